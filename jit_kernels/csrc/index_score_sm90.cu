// Index scores over paged MXFP4 keys on Hopper: S[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]).
//
// A page is 64 keys: 64 x 64 bytes of e2m1 nibbles (even element low), then 64 x 4 ue8m0 scales, one per 32 elements.
// Keys are the A operand of an FP8 wgmma and go from shared memory through registers: the e2m1 values of a row become
// e4m3 exactly, with the group scales of the row folded into their exponents, relative to the row's largest. The heads
// are the N dimension. What a warp reads of a page is contiguous, because lane c of a quad takes the whole 16-byte
// group c of its row; the query is stored to shared memory in the order of K that follows from that.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace index_score {

constexpr int kHeadDim = 128;
constexpr int kHeads = 64;
constexpr int kPageEntries = 64;
constexpr int kScaleOffset = kPageEntries * kHeadDim / 2;
constexpr int kPageBytes = kScaleOffset + kPageEntries * 4;
constexpr int kThreads = 128;
constexpr int kQueryBytes = kHeads * kHeadDim;
constexpr int kPageIds = 256;
// The largest group of a row is stored times 2^6: 6 * 2^6 = 384 is e4m3's second largest number.
constexpr int kTopExponent = 6;
// From this distance on every value of a group is below half of e4m3's smallest.
constexpr int kScaleSteps = 20;

// Mirrored in index_score_cuda.py.
struct Params {
  const uint8_t* q;              // e4m3 [T, heads, 128]
  const float* weights;          // [T, heads]
  const uint8_t* pages;          // [page_count, kPageBytes]
  const int32_t* page_table;     // [requests, table_stride]
  const int64_t* query_request;  // [T]
  const int32_t* lens;           // [T]
  float* out;                    // [T, out_stride], `width` columns in use
  int64_t out_stride, table_stride;
  int queries, heads, width, page_count;
  int clean;  // whether columns at and beyond a length become -inf
};

// ---- PTX ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "wait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra.uni end;\n bra.uni wait;\n"
      "end:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_page(uint32_t to, const uint8_t* from, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kPageBytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(kPageBytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products; ties d to the wait, which the compiler does not see to write it.
__device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d (+)= A[64, 32] (registers) * B[64 heads, 32]^T (shared memory)
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
      " {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// ---- one page -----------------------------------------------------------------------------------------------------

// Shared memory of a block; `Queries` tiles of q, a ring of `Stages` pages.
template <int Stages, int Queries>
struct Shared {
  alignas(1024) uint8_t q[Queries][kQueryBytes];
  alignas(128) uint8_t page[Stages][kPageBytes];
  uint2 values[kScaleSteps];  // by distance from the row's largest scale: the eight magnitudes as e4m3
  int32_t ids[kPageIds];
  float weights[Queries][kHeads];
  uint64_t full[Stages];
};

// Descriptor of a 64 x 128-byte K-major tile with the 128-byte swizzle; rows of 8 are 1024 bytes apart.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  return static_cast<uint64_t>((shared_address(tile) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void make_value_table(uint2* values) {
  if (threadIdx.x < kScaleSteps) {
    const float scale = exp2f(static_cast<float>(kTopExponent - static_cast<int>(threadIdx.x)));
    constexpr float magnitude[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    uint32_t half[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = __nv_cvt_float_to_fp8(magnitude[i] * scale, __NV_SATFINITE, __NV_E4M3);
      half[i / 4] |= byte << (8 * (i % 4));
    }
    values[threadIdx.x] = make_uint2(half[0], half[1]);
  }
}

// 16-byte piece a of row h of q: its words go to the places of K that the unpacked keys have.
__device__ __forceinline__ void store_query_piece(uint8_t* tile, int h, int a, uint4 piece) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int chunk = (a & 1) * 4 + u;
    *reinterpret_cast<uint32_t*>(tile + h * kHeadDim + ((chunk ^ (h & 7)) << 4) + (a >> 1) * 4) = words[u];
  }
}

__device__ __forceinline__ void load_query(const Params& p, int t, uint8_t* tile) {
  const uint4* source = reinterpret_cast<const uint4*>(p.q + static_cast<int64_t>(t) * p.heads * kHeadDim);
  uint4 piece[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = threadIdx.x + i * kThreads;
    piece[i] = index < p.heads * 8 ? __ldg(source + index) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = threadIdx.x + i * kThreads;
    store_query_piece(tile, index >> 3, index & 7, piece[i]);
  }
}

// One row's group of 32 nibbles as e4m3, into the four K steps' A registers of that row (0: upper, 1: lower).
__device__ __forceinline__ void unpack(uint4 nibbles, uint2 values, int row, uint32_t (&a)[4][4]) {
  const uint32_t words[4] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = words[i];
    const uint32_t magnitudes = x & 0x77777777u;
    const uint32_t shifted = x << 4;
    const uint32_t low = permute(values.x, values.y, magnitudes);
    const uint32_t high = permute(values.x, values.y, magnitudes >> 16);
    a[i][row] = low | (permute(shifted, x, 0x5140) & 0x80808080u);
    a[i][2 + row] = high | (permute(shifted, x, 0x7362) & 0x80808080u);
  }
}

struct Keys {
  uint32_t a[4][4];
  int scale;  // ue8m0 of the row that this lane stores
};

// Where a thread reads and writes in every page. Opaque, or the compiler works it out again for every page.
struct Place {
  int values, scales;  // bytes from the start of a page to this thread's group of the upper row; the lower is 8 rows on
  int row;             // the row whose score it stores

  __device__ __forceinline__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    values = warp * 1024 + lane * 16;
    scales = kScaleOffset + warp * 64 + lane;
    row = warp * 16 + lane / 4 + 8 * (lane & 1);
    asm volatile("" : "+r"(values), "+r"(scales), "+r"(row));
  }
};

__device__ __forceinline__ void read_keys(const uint8_t* page, const Place& place, const uint2* values, Keys& keys) {
  const uint4 upper = *reinterpret_cast<const uint4*>(page + place.values);
  const uint4 lower = *reinterpret_cast<const uint4*>(page + place.values + 512);
  const int s0 = page[place.scales];
  const int s1 = page[place.scales + 32];
  // Both rows' scales in one word, so that two shuffles give both maxima.
  uint32_t both = static_cast<uint32_t>(s0) | static_cast<uint32_t>(s1) << 16;
  both = __vmaxu2(both, __shfl_xor_sync(~0u, both, 1));
  both = __vmaxu2(both, __shfl_xor_sync(~0u, both, 2));
  const int top0 = both & 0xFFFF, top1 = both >> 16;
  keys.scale = threadIdx.x & 1 ? top1 : top0;
  unpack(upper, values[min(top0 - s0, kScaleSteps - 1)], 0, keys.a);
  unpack(lower, values[min(top1 - s1, kScaleSteps - 1)], 1, keys.a);
}

__device__ __forceinline__ void dots(const Keys& keys, uint64_t tile, float (&d)[32]) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, keys.a[k], tile + 2 * k, k > 0);
  wgmma_commit();
}

// sum_h w_h relu(d_h) of the row that this lane stores: row lane / 4, of the lower eight in odd lanes.
// relu(x) = (x + |x|) / 2: two FMAs, where a maximum would go to the integer pipe that unpacks, and NaN stays NaN.
template <typename Weight>
__device__ __forceinline__ float weigh(const float (&d)[32], Weight weight) {
  float sum[2] = {0.f, 0.f}, absolute[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 w = weight(j);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float x = d[4 * j + 2 * row], y = d[4 * j + 2 * row + 1];
      sum[row] = fmaf(w.x, x, sum[row]);
      absolute[row] = fmaf(w.x, fabsf(x), absolute[row]);
      sum[row] = fmaf(w.y, y, sum[row]);
      absolute[row] = fmaf(w.y, fabsf(y), absolute[row]);
    }
  }
  const float upper = sum[0] + absolute[0], lower = sum[1] + absolute[1];
  const bool odd = threadIdx.x & 1;
  float total = (odd ? lower : upper) + __shfl_xor_sync(~0u, odd ? upper : lower, 1);
  return total + __shfl_xor_sync(~0u, total, 2);
}

__device__ __forceinline__ float apply_scale(float total, int ue8m0) {
  constexpr float unit = 1.f / (2 << kTopExponent);  // the half of relu, and the 2^6 of the value table
  // 0 is 2^-127, a subnormal; 255 is NaN.
  const uint32_t bits = static_cast<uint32_t>(ue8m0) << 23 | (ue8m0 == 0 || ue8m0 == 255 ? 0x400000u : 0u);
  return total * unit * __uint_as_float(bits);
}

// `to` is where the score of this thread's row of page 0 would go.
__device__ __forceinline__ void store(float* to, int row, int page, int len, int end, float score) {
  const int entry = page * kPageEntries + row;
  if (!(threadIdx.x & 2) && entry < end) to[page * kPageEntries] = entry < len ? score : -INFINITY;
}

__device__ __forceinline__ int seen(const Params& p, int t) { return max(0, min(__ldg(p.lens + t), p.width)); }
__device__ __forceinline__ int pages_of(int len) { return (len + kPageEntries - 1) / kPageEntries; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// -inf from the last scored page of every query to the end of its row.
__device__ __forceinline__ void clean_rest(const Params& p, int first, int last, int part, int parts) {
#pragma unroll 1
  for (int t = first; t < last; ++t) {
    const int start = pages_of(seen(p, t)) * kPageEntries;
#pragma unroll 1
    for (int i = start + part * kThreads + threadIdx.x; i < p.width; i += parts * kThreads)
      p.out[t * p.out_stride + i] = -INFINITY;
  }
}

// The pages first .. last - 1 of a request through the ring. `visit(page ordinal, keys)` runs in all threads.
// Every thread must come here with the ring empty; `phase` lives as long as the barriers.
template <int Stages, int Queries, typename Ready, typename Visit>
__device__ __forceinline__ void for_pages(const Params& p, Shared<Stages, Queries>& shared, int64_t request, int first,
                                          int last, const Place& place, int& stage, uint32_t& phase, Ready ready,
                                          Visit visit) {
  const int count = last - first;
  const int32_t* table = p.page_table + request * p.table_stride + first;
  const auto read_ids = [&](int from) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kPageIds && from + i < count; i += kThreads)
      shared.ids[i] = min(max(__ldg(table + from + i), 0), p.page_count - 1);
  };
  const auto fetch = [&](int i, int into) {
    copy_page(shared_address(shared.page[into]),
              p.pages + static_cast<int64_t>(shared.ids[i % kPageIds]) * kPageBytes, shared_address(&shared.full[into]));
  };
  read_ids(0);
  __syncthreads();
  if (threadIdx.x == 0)
#pragma unroll 1
    for (int i = 0, into = stage; i < min(Stages, count); ++i, into = into + 1 == Stages ? 0 : into + 1) fetch(i, into);
  ready();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    barrier_wait(shared_address(&shared.full[stage]), phase);
    Keys keys;
    read_keys(shared.page[stage], place, shared.values, keys);
    __syncthreads();  // all have read the stage, and thread 0 has used the page numbers before i + Stages
    const int next = i + Stages;
    if (next < count) {
      if (next % kPageIds == 0) {
        read_ids(next);
        __syncthreads();
      }
      if (threadIdx.x == 0) fetch(next, stage);
    }
    if (++stage == Stages) stage = 0, phase ^= 1;
    visit(first + i, keys);
  }
}

template <int Stages, int Queries>
__device__ __forceinline__ Shared<Stages, Queries>& set_up(uint8_t* raw) {
  // An offset, not a rounded pointer: the compiler must still see that this is shared memory.
  auto& shared = *reinterpret_cast<Shared<Stages, Queries>*>(raw + (-shared_address(raw) & 1023));
  make_value_table(shared.values);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) barrier_init(shared_address(&shared.full[i]));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  return shared;
}

// ---- decode: one query at a time, the pages of all queries shared out evenly ----------------------------------------

__device__ __forceinline__ int count_chunks(const Params& p, int chunk) {
  int n = 0;
#pragma unroll 1
  for (int t = threadIdx.x % 32; t < p.queries; t += 32) n += ceil_div(pages_of(seen(p, t)), chunk);
  return __reduce_add_sync(~0u, n);
}

// Pages per chunk, so that no chunk crosses queries and there is at most one for every block, if that can be.
__device__ __forceinline__ int plan_chunks(const Params& p, int& chunks) {
  const int blocks = gridDim.x, total = count_chunks(p, 1);
  int chunk = max(1, ceil_div(total, blocks));
  chunks = count_chunks(p, chunk);
  if (chunks <= blocks || p.queries >= blocks) return chunk;
  int low = chunk, high = ceil_div(total, blocks - p.queries);  // too small, and large enough
#pragma unroll 1
  for (int i = 0; i < 4 && high - low > 1; ++i) {
    const int middle = (low + high) / 2;
    if (count_chunks(p, middle) <= blocks)
      high = middle;
    else
      low = middle;
  }
  chunks = count_chunks(p, high);
  return high;
}

// The query of chunk number `index`, and which of its chunks that is. Every warp finds it for itself.
__device__ __forceinline__ int find_chunk(const Params& p, int chunk, int index, int& ordinal) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.queries; base += 32) {
    const int t = base + lane;
    const int mine = t < p.queries ? ceil_div(pages_of(seen(p, t)), chunk) : 0;
    int through = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const unsigned hit = __ballot_sync(~0u, index < before + through);
    if (hit) {
      const int source = __ffs(hit) - 1;
      ordinal = index - before - __shfl_sync(~0u, through - mine, source);
      return base + source;
    }
    before += __shfl_sync(~0u, through, 31);
  }
  return 0;
}

template <int Stages, int BlocksPerSm>
__global__ void __launch_bounds__(kThreads, BlocksPerSm) score_each(const Params p) {
  extern __shared__ uint8_t raw[];
  auto& shared = set_up<Stages, 1>(raw);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int t = threadIdx.x; t < p.queries && t < kThreads; t += kThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.query_request + t));
  const Place place;
  int chunks, stage = 0;
  uint32_t phase = 0;
  const int chunk = plan_chunks(p, chunks);
  const int lane = threadIdx.x % 32;
  for (int index = blockIdx.x; index < chunks; index += gridDim.x) {
    int ordinal = 0;
    const int t = find_chunk(p, chunk, index, ordinal);
    const int len = seen(p, t), first = ordinal * chunk, last = min(first + chunk, pages_of(len));
    float2 weights[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int h = 8 * j + 2 * (lane & 3);
      const float* w = p.weights + static_cast<int64_t>(t) * p.heads + h;
      weights[j] = make_float2(h < p.heads ? __ldg(w) : 0.f, h + 1 < p.heads ? __ldg(w + 1) : 0.f);
    }
    const uint64_t tile = tile_descriptor(shared.q[0]);
    const auto ready = [&] {
      load_query(p, t, shared.q[0]);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    };
    float* to = p.out + t * p.out_stride + place.row;
    const int end = p.clean ? p.width : len;
    const auto visit = [&](int page, const Keys& keys) {
      float d[32];
      dots(keys, tile, d);
      wgmma_wait(d);
      const float total = weigh(d, [&](int j) { return weights[j]; });
      store(to, place.row, page, len, end, apply_scale(total, keys.scale));
    };
    for_pages(p, shared, __ldg(p.query_request + t), first, last, place, stage, phase, ready, visit);
  }
  if (p.clean) clean_rest(p, 0, p.queries, blockIdx.x, gridDim.x);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- prefill: a block of neighbouring queries against the same unpacked keys ---------------------------------------

template <int Stages, int Queries, int BlocksPerSm>
__global__ void __launch_bounds__(kThreads, BlocksPerSm) score_blocks(const Params p) {
  extern __shared__ uint8_t raw[];
  auto& shared = set_up<Stages, Queries>(raw);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int begin = blockIdx.y * Queries, end = min(begin + Queries, p.queries);
  const int lane = threadIdx.x % 32;
  const Place place;
  int stage = 0;
  uint32_t phase = 0;
  for (int t0 = begin, t1; t0 < end; t0 = t1) {
    // A run of queries of one request.
    const int64_t request = __ldg(p.query_request + t0);
    int most = seen(p, t0);
    for (t1 = t0 + 1; t1 < end && __ldg(p.query_request + t1) == request; ++t1) most = max(most, seen(p, t1));
    const int64_t pages = pages_of(most);
    const int first = pages * blockIdx.x / gridDim.x, last = pages * (blockIdx.x + 1) / gridDim.x;
    if (first == last) continue;
    int lens[Queries];
#pragma unroll
    for (int u = 0; u < Queries; ++u) lens[u] = t0 + u < t1 ? seen(p, t0 + u) : 0;
    const auto ready = [&] {
#pragma unroll 1
      for (int u = 0; u < t1 - t0; ++u) {
        load_query(p, t0 + u, shared.q[u]);
        if (threadIdx.x < kHeads)
          shared.weights[u][threadIdx.x] =
              threadIdx.x < p.heads ? __ldg(p.weights + static_cast<int64_t>(t0 + u) * p.heads + threadIdx.x) : 0.f;
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    };
    const auto visit = [&](int page, const Keys& keys) {
#pragma unroll
      for (int u = 0; u < Queries; ++u) {
        if (page * kPageEntries >= lens[u]) continue;
        float d[32];
        dots(keys, tile_descriptor(shared.q[u]), d);
        wgmma_wait(d);
        const float total = weigh(d, [&](int j) {
          return *reinterpret_cast<const float2*>(&shared.weights[u][8 * j + 2 * (lane & 3)]);
        });
        store(p.out + (t0 + u) * p.out_stride + place.row, place.row, page, lens[u], p.clean ? p.width : lens[u],
              apply_scale(total, keys.scale));
      }
    };
    for_pages(p, shared, request, first, last, place, stage, phase, ready, visit);
  }
  if (p.clean) clean_rest(p, begin, end, blockIdx.x, gridDim.x);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- query --------------------------------------------------------------------------------------------------------

// fp32 rows to e4m3 times a power of two that goes to the head's weight. A warp takes a row of 128.
__global__ void __launch_bounds__(kThreads) fold_query(const float* __restrict__ q, const float* __restrict__ weights,
                                                       uint32_t* __restrict__ folded, float* __restrict__ out, int rows) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row < rows) {
    const float4 x = reinterpret_cast<const float4*>(q)[static_cast<int64_t>(row) * 32 + lane];
    const uint32_t absolute = ~(1u << 31);
    const uint32_t largest = max(max(__float_as_uint(x.x) & absolute, __float_as_uint(x.y) & absolute),
                                 max(__float_as_uint(x.z) & absolute, __float_as_uint(x.w) & absolute));
    const uint32_t top = __reduce_max_sync(~0u, largest);
    // 448 is 1.75 * 2^8: the smallest power of two that brings the row's largest value to at most that.
    const int exponent = static_cast<int>(top >> 23) - 127 - 8 + ((top & 0x7FFFFF) > 0x600000);
    const int shift = min(max(exponent, -100), 100);
    const float inverse = __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
    const float values[4] = {x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse};
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(values[i], __NV_SATFINITE, __NV_E4M3)) << (8 * i);
    // Infinity would saturate: a faulty query must show.
    if (top >= 0x7F800000u) packed = 0x7F7F7F7Fu;
    folded[static_cast<int64_t>(row) * 32 + lane] = packed;
    if (lane == 0) out[row] = weights[row] * __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- launches -----------------------------------------------------------------------------------------------------

#ifndef DECODE_STAGES
#define DECODE_STAGES 4
#endif
#ifndef DECODE_BLOCKS
#define DECODE_BLOCKS 4
#endif
#ifndef PREFILL_STAGES
#define PREFILL_STAGES 3
#endif
#ifndef PREFILL_QUERIES
#define PREFILL_QUERIES 4
#endif
#ifndef PREFILL_BLOCKS
#define PREFILL_BLOCKS 4
#endif

// With programmatic dependent launch: a kernel's set-up runs while the one before it ends.
template <typename... Arguments, typename... Given>
cudaError_t launch(void (*kernel)(Arguments...), dim3 grid, size_t shared_bytes, void* stream, Given... arguments) {
  if (shared_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments>(arguments)...);
}

}  // namespace index_score

// Return a cudaError_t. Shapes, dtypes and strides are the caller's to check.
extern "C" int index_score_each(const index_score::Params* p, int multiprocessors, void* stream) {
  using namespace index_score;
  return launch(score_each<DECODE_STAGES, DECODE_BLOCKS>, dim3(multiprocessors * DECODE_BLOCKS),
                sizeof(Shared<DECODE_STAGES, 1>) + 1023, stream, *p);
}

extern "C" int index_score_blocks(const index_score::Params* p, int multiprocessors, void* stream) {
  using namespace index_score;
  const int rows = (p->queries + PREFILL_QUERIES - 1) / PREFILL_QUERIES;
  // Enough blocks to even out what causal lengths leave uneven, each of at least eight pages.
  const int pages = (p->width + kPageEntries - 1) / kPageEntries;
  const int splits = std::max(1, std::min((pages + 7) / 8, 16 * multiprocessors / rows));
  return launch(score_blocks<PREFILL_STAGES, PREFILL_QUERIES, PREFILL_BLOCKS>, dim3(splits, rows),
                sizeof(Shared<PREFILL_STAGES, PREFILL_QUERIES>) + 1023, stream, *p);
}

extern "C" int index_score_fold_query(const float* q, const float* weights, void* folded, float* out, int rows,
                                      void* stream) {
  using namespace index_score;
  return launch(fold_query, dim3((rows + 3) / 4), 0, stream, q, weights, static_cast<uint32_t*>(folded), out, rows);
}
