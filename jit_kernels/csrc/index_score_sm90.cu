// Index scores over paged MXFP4 keys on Hopper: S[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]).
//
// A page is 64 keys: 64 x 64 bytes of e2m1 nibbles (even element low), then 64 x 4 ue8m0 scales, one per 32 elements.
// Keys are the A operand of an FP8 wgmma and go from shared memory through registers: the e2m1 values of a row become
// e4m3 exactly, with the group scales of the row folded into their exponents, relative to the row's largest. The heads
// are the N dimension. What a warp reads of a page is contiguous, because lane c of a quad takes the whole 16-byte
// group c of its row; the query is stored to shared memory in the order of K that follows from that.
#include <algorithm>

#include "index_score_sm90.cuh"

namespace index_score {

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

__device__ __forceinline__ int seen(const Params& p, int t) { return max(0, min(__ldg(p.lens + t), p.width)); }
__device__ __forceinline__ int pages_of(int len) { return (len + kPageEntries - 1) / kPageEntries; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Entries that the request sees get their score; others inside the row, -inf if that is wanted.
__device__ __forceinline__ void store(float* row, int entry, int len, int end, float score) {
  if (entry < end) row[entry] = entry < len ? score : -INFINITY;
}

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

// Pages of a request on their way into shared memory, `Stages` at most.
template <int Stages, int Queries>
struct Ring {
  using Memory = Shared<Stages, Queries>;
  Memory& shared;
  uint32_t base;  // address of `shared`
  int stage = 0;
  uint32_t phase = 0;
  const uint8_t* pages = nullptr;
  const int32_t* table = nullptr;
  int count = 0, page_count = 0;

  __device__ __forceinline__ explicit Ring(uint8_t* raw) : shared(*reinterpret_cast<Memory*>(raw)) {
    base = shared_address(raw);
    asm volatile("" : "+r"(base));
    make_tables(shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < Stages; ++i) barrier_init(full(i));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }

  __device__ __forceinline__ uint32_t page(int i) const {
    return base + static_cast<uint32_t>(offsetof(Memory, page)) + i * kPageBytes;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base + static_cast<uint32_t>(offsetof(Memory, full)) + i * 8;
  }
  __device__ __forceinline__ uint32_t values() const { return base + static_cast<uint32_t>(offsetof(Memory, values)); }
  __device__ __forceinline__ uint32_t scales() const { return base + static_cast<uint32_t>(offsetof(Memory, scales)); }
  __device__ __forceinline__ uint32_t query(int i) const { return base + i * kQueryBytes; }

  // Starts on pages first .. last - 1 of a request; all threads, with the ring empty.
  __device__ __forceinline__ void start(const Params& p, int64_t request, int first, int last) {
    pages = p.pages, page_count = p.page_count, count = last - first;
    table = p.page_table + request * p.table_stride + first;
    read_ids(0);
    __syncthreads();
    if (threadIdx.x == 0)
#pragma unroll 1
      for (int i = 0, into = stage; i < min(Stages, count); ++i, into = into + 1 == Stages ? 0 : into + 1) fetch(i, into);
  }

  __device__ __forceinline__ void wait(int i) const { barrier_wait(full(i), phase); }

  // After all have read the pages i .. i + n - 1: their stages take the pages Stages further on.
  template <int N>
  __device__ __forceinline__ void refill(int i) {
    __syncthreads();
    const int next = i + Stages;
    if (next < count) {
      if (next % kPageIds == 0) {
        read_ids(next);
        __syncthreads();
      }
      // Two warps share the work.
      if (threadIdx.x == 0) fetch(next, stage);
      if (N == 2 && threadIdx.x == 32 && next + 1 < count) fetch(next + 1, stage + 1);
    }
    stage += N;
    if (stage == Stages) stage = 0, phase ^= 1;
  }

  // After a last page without a second: passes both stages, so that pairs stay together and barriers in step.
  __device__ __forceinline__ void skip_odd() {
    if (threadIdx.x == 0) barrier_arrive(full(stage + 1));
    stage += 2;
    if (stage == Stages) stage = 0, phase ^= 1;
  }

 private:
  __device__ __forceinline__ void read_ids(int from) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kPageIds && from + i < count; i += kThreads)
      shared.ids[i] = min(max(__ldg(table + from + i), 0), page_count - 1);
  }
  __device__ __forceinline__ void fetch(int i, int into) {
    copy_page(page(into), pages + static_cast<int64_t>(shared.ids[i % kPageIds]) * kPageBytes, full(into));
  }
};

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
  static_assert(Stages % 2 == 0 && kPageIds % 2 == 0, "pages are taken in pairs");
  extern __shared__ __align__(1024) uint8_t raw[];
  Ring<Stages, 1> ring(raw);
  const Place place;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x < p.queries) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.query_request + threadIdx.x));
  int chunks;
  const int chunk = plan_chunks(p, chunks);
  const int quad = threadIdx.x & 3;
  const uint64_t tile = tile_descriptor(ring.query(0));
#pragma unroll 1
  for (int index = blockIdx.x; index < chunks; index += gridDim.x) {
    int ordinal = 0;
    const int t = find_chunk(p, chunk, index, ordinal);
    const int len = seen(p, t), first = ordinal * chunk, last = min(first + chunk, pages_of(len));
    ring.start(p, __ldg(p.query_request + t), first, last);
    float2 weights[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int h = 8 * j + 2 * quad;
      const float* w = p.weights + static_cast<int64_t>(t) * p.heads + h;
      weights[j] = make_float2(h < p.heads ? __ldg(w) : 0.f, h + 1 < p.heads ? __ldg(w + 1) : 0.f);
    }
    load_query(p.q + static_cast<int64_t>(t) * p.heads * kHeadDim, p.heads, ring.shared.q[0]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const auto weight = [&](int j) { return weights[j]; };
    float* to = p.out + t * p.out_stride;
    int end = p.clean ? p.width : len;
    asm volatile("" : "+l"(to), "+r"(end));
    int entry = (first + quad / 2) * kPageEntries + place.row;
    int i = 0;
    // Two pages at a time: the tensor cores work on one while the other is unpacked or summed.
#pragma unroll 1
    for (; i + 1 < ring.count; i += 2, entry += 2 * kPageEntries) {
      Packed packed[2];
      uint32_t largest[2], a[2][4][4];
      float d[2][32], total[2][2];
      ring.wait(ring.stage);
      packed[0].read(ring.page(ring.stage), place);
      ring.wait(ring.stage + 1);
      packed[1].read(ring.page(ring.stage + 1), place);
      largest[0] = largest_scales(packed[0]);
      largest[1] = largest_scales(packed[1]);
      ring.template refill<2>(i);
      unpack(packed[0], largest[0], ring.values(), a[0]);
      dots(a[0], tile, d[0]);
      unpack(packed[1], largest[1], ring.values(), a[1]);
      dots(a[1], tile, d[1]);
      const float scale = load_shared_float(ring.scales() + 4 * permute(largest[0], largest[1], place.top));
      wgmma_wait<1>(d[0]);
      weigh(d[0], weight, total[0]);
      // Keeps this sum before the wait, which the compiler would move up.
      asm volatile("" : "+f"(total[0][0]), "+f"(total[0][1]));
      wgmma_wait<0>(d[1]);
      weigh(d[1], weight, total[1]);
      store(to, entry, len, end, reduce(total[0], total[1]) * scale);
    }
    if (i < ring.count) {
      Packed packed;
      uint32_t a[4][4];
      float d[32], total[2];
      constexpr float none[2] = {0.f, 0.f};
      ring.wait(ring.stage);
      packed.read(ring.page(ring.stage), place);
      const uint32_t largest = largest_scales(packed);
      unpack(packed, largest, ring.values(), a);
      dots(a, tile, d);
      const float scale = load_shared_float(ring.scales() + 4 * permute(largest, largest, place.top));
      wgmma_wait<0>(d);
      weigh(d, weight, total);
      const float score = reduce(total, none) * scale;
      if (quad < 2) store(to, entry, len, end, score);
      ring.skip_odd();
    }
  }
  if (p.clean) clean_rest(p, 0, p.queries, blockIdx.x, gridDim.x);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- prefill: a block of neighbouring queries against the same unpacked keys ---------------------------------------

template <int Stages, int Queries, int BlocksPerSm>
__global__ void __launch_bounds__(kThreads, BlocksPerSm) score_blocks(const Params p) {
  static_assert(Queries % 2 == 0, "queries are taken in pairs");
  extern __shared__ __align__(1024) uint8_t raw[];
  using Memory = Shared<Stages, Queries>;
  Ring<Stages, Queries> ring(raw);
  const Place place;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int begin = blockIdx.y * Queries, end = min(begin + Queries, p.queries);
  const int quad = threadIdx.x & 3;
#pragma unroll 1
  for (int t0 = begin, t1; t0 < end; t0 = t1) {
    // A run of queries of one request.
    const int64_t request = __ldg(p.query_request + t0);
    int most = seen(p, t0);
#pragma unroll 1
    for (t1 = t0 + 1; t1 < end && __ldg(p.query_request + t1) == request; ++t1) most = max(most, seen(p, t1));
    const int64_t pages = pages_of(most);
    const int first = pages * blockIdx.x / gridDim.x, last = pages * (blockIdx.x + 1) / gridDim.x;
    if (first == last) continue;
    ring.start(p, request, first, last);
#pragma unroll 1
    for (int u = 0; u < t1 - t0; ++u) {
      load_query(p.q + static_cast<int64_t>(t0 + u) * p.heads * kHeadDim, p.heads, ring.shared.q[u]);
      if (threadIdx.x < kHeads)
        ring.shared.weights[u][threadIdx.x] =
            threadIdx.x < p.heads ? __ldg(p.weights + static_cast<int64_t>(t0 + u) * p.heads + threadIdx.x) : 0.f;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    // In a pair of queries this thread stores for the one of its half of the quad.
    float* to[Queries / 2];
    int lens[Queries / 2], ends[Queries / 2];
#pragma unroll
    for (int u = 0; u < Queries / 2; ++u) {
      const int t = t0 + 2 * u + quad / 2;
      lens[u] = t < t1 ? seen(p, t) : 0;
      // -inf goes no further than the query's last page here: clean_rest begins there.
      ends[u] = t < t1 ? (p.clean ? min(p.width, pages_of(lens[u]) * kPageEntries) : lens[u]) : 0;
      to[u] = p.out + static_cast<int64_t>(min(t, t1 - 1)) * p.out_stride;
    }
    int entry = first * kPageEntries + place.row;
#pragma unroll 1
    for (int i = 0; i < ring.count; ++i, entry += kPageEntries) {
      Packed packed;
      uint32_t a[4][4];
      ring.wait(ring.stage);
      packed.read(ring.page(ring.stage), place);
      const uint32_t largest = largest_scales(packed);
      ring.template refill<1>(i);
      unpack(packed, largest, ring.values(), a);
      const float scale = load_shared_float(ring.scales() + 4 * permute(largest, largest, place.top));
      const auto weigh_query = [&](const float(&d)[32], int u, float(&total)[2]) {
        const uint32_t from = ring.base + static_cast<uint32_t>(offsetof(Memory, weights)) +
                              u * kHeads * 4 + quad * 8;
        weigh(d, [&](int j) {
          uint32_t w[2];
          load_shared(from + j * 32, w);
          return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
        }, total);
      };
      // The tensor cores are one query ahead of the sums.
      float d[2][32], total[2][2];
      dots(a, tile_descriptor(ring.query(0)), d[0]);
#pragma unroll
      for (int u = 0; u < Queries; ++u) {
        if (u + 1 < Queries) {
          dots(a, tile_descriptor(ring.query(u + 1)), d[(u + 1) % 2]);
          wgmma_wait<1>(d[u % 2]);
        } else {
          wgmma_wait<0>(d[u % 2]);
        }
        weigh_query(d[u % 2], u, total[u % 2]);
        if (u % 2) store(to[u / 2], entry, lens[u / 2], ends[u / 2], reduce(total[0], total[1]) * scale);
      }
    }
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
#define DECODE_STAGES 6
#endif
#ifndef DECODE_BLOCKS
#define DECODE_BLOCKS 3
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
                sizeof(Shared<DECODE_STAGES, 1>), stream, *p);
}

extern "C" int index_score_blocks(const index_score::Params* p, int multiprocessors, void* stream) {
  using namespace index_score;
  const int rows = (p->queries + PREFILL_QUERIES - 1) / PREFILL_QUERIES;
  // Enough blocks to even out what causal lengths leave uneven, each of at least eight pages.
  const int pages = (p->width + kPageEntries - 1) / kPageEntries;
  const int splits = std::max(1, std::min((pages + 7) / 8, 16 * multiprocessors / rows));
  return launch(score_blocks<PREFILL_STAGES, PREFILL_QUERIES, PREFILL_BLOCKS>, dim3(splits, rows),
                sizeof(Shared<PREFILL_STAGES, PREFILL_QUERIES>), stream, *p);
}

extern "C" int index_score_fold_query(const float* q, const float* weights, void* folded, float* out, int rows,
                                      void* stream) {
  using namespace index_score;
  return launch(fold_query, dim3((rows + 3) / 4), 0, stream, q, weights, static_cast<uint32_t*>(folded), out, rows);
}
