// Pieces of the MXFP4 index score kernels: memory, tensor cores, one page of keys, the weighted sum over heads.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
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

// ---- PTX ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "wait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra.uni end;\n bra.uni wait;\n"
      "end:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

template <int N>
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&to)[N]) {
  if constexpr (N == 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  else
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t from) {
  uint32_t to;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(to) : "r"(from));
  return to;
}

__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float to;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to) : "r"(from));
  return to;
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

// Waits until at most `Younger` groups are left; ties d to the wait, which the compiler does not see to write it.
template <int Younger>
__device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Younger) : "memory");
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

// Shared memory of a block: `Queries` tiles of q, a ring of `Stages` pages, tables. Read by address: the compiler
// would else work out the base of shared memory again for every page.
template <int Stages, int Queries>
struct Shared {
  alignas(1024) uint8_t q[Queries][kQueryBytes];
  alignas(128) uint8_t page[Stages][kPageBytes];
  uint2 values[kScaleSteps];  // by distance from the row's largest scale: the eight magnitudes as e4m3
  float scales[256];          // by ue8m0: what a row's sum is multiplied by
  int32_t ids[kPageIds];
  float weights[Queries][kHeads];
  uint64_t full[Stages];
};

// Descriptor of a 64 x 128-byte K-major tile with the 128-byte swizzle; rows of 8 are 1024 bytes apart.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t tile) {
  return static_cast<uint64_t>((tile & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <typename SharedMemory>
__device__ __forceinline__ void make_tables(SharedMemory& shared) {
  if (threadIdx.x < kScaleSteps) {
    const float scale = exp2f(static_cast<float>(kTopExponent - static_cast<int>(threadIdx.x)));
    constexpr float magnitude[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    uint32_t half[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = __nv_cvt_float_to_fp8(magnitude[i] * scale, __NV_SATFINITE, __NV_E4M3);
      half[i / 4] |= byte << (8 * (i % 4));
    }
    shared.values[threadIdx.x] = make_uint2(half[0], half[1]);
  }
#pragma unroll
  for (int i = 0; i < 256 / kThreads; ++i) {
    // ue8m0 0 is 2^-127, a subnormal; 255 is NaN. The half of relu and the 2^6 of the value table are undone here.
    const int ue8m0 = threadIdx.x + i * kThreads;
    const uint32_t bits = static_cast<uint32_t>(ue8m0) << 23 | (ue8m0 == 0 || ue8m0 == 255 ? 0x400000u : 0u);
    shared.scales[ue8m0] = __uint_as_float(bits) * (1.f / (2 << kTopExponent));
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

// q e4m3 [heads, 128] to a tile; heads that there are not become zeros.
__device__ __forceinline__ void load_query(const uint8_t* q, int heads, uint8_t* tile) {
  uint4 piece[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = threadIdx.x + i * kThreads;
    piece[i] = index < heads * 8 ? __ldg(reinterpret_cast<const uint4*>(q) + index) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = threadIdx.x + i * kThreads;
    store_query_piece(tile, index >> 3, index & 7, piece[i]);
  }
}

// One row's group of 32 nibbles as e4m3, into the four K steps' A registers of that row (0: upper, 1: lower).
__device__ __forceinline__ void unpack(const uint32_t (&nibbles)[4], const uint32_t (&values)[2], int row,
                                       uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = nibbles[i];
    const uint32_t magnitudes = x & 0x77777777u;
    const uint32_t shifted = x << 4;
    const uint32_t low = permute(values[0], values[1], magnitudes);
    const uint32_t high = permute(values[0], values[1], magnitudes >> 16);
    a[i][row] = low | (permute(shifted, x, 0x5140) & 0x80808080u);
    a[i][2 + row] = high | (permute(shifted, x, 0x7362) & 0x80808080u);
  }
}

// What a thread reads and writes in every page: of two rows, eight apart, the group of its place in the quad.
// Opaque, or the compiler works it out again for every page.
struct Place {
  uint32_t values, scales;  // bytes from the start of a page to the group of the upper row
  uint32_t top;             // selector of the scale that goes with the score this thread stores
  int row;                  // the row of that score

  __device__ __forceinline__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    values = warp * 1024 + lane * 16;
    scales = kScaleOffset + warp * 64 + lane;
    top = 0x1110 + 2 * (lane & 3);
    row = warp * 16 + lane / 4 + 8 * (lane & 1);
    asm volatile("" : "+r"(values), "+r"(scales), "+r"(top), "+r"(row));
  }
};

// Two rows' groups as they are in the page.
struct Packed {
  uint32_t upper[4], lower[4], upper_scale, lower_scale;

  __device__ __forceinline__ void read(uint32_t page, const Place& place) {
    upper_scale = load_shared_byte(page + place.scales);
    lower_scale = load_shared_byte(page + place.scales + 32);
    load_shared(page + place.values, upper);
    load_shared(page + place.values + 512, lower);
  }
};

// The largest scale of the upper row, and of the lower in the high half: both by two shuffles.
__device__ __forceinline__ uint32_t largest_scales(const Packed& packed) {
  uint32_t both = packed.upper_scale | packed.lower_scale << 16;
  both = __vmaxu2(both, __shfl_xor_sync(~0u, both, 1));
  return __vmaxu2(both, __shfl_xor_sync(~0u, both, 2));
}

__device__ __forceinline__ void unpack(const Packed& packed, uint32_t largest, uint32_t table, uint32_t (&a)[4][4]) {
  const int upper = (largest & 0xFFFF) - packed.upper_scale, lower = (largest >> 16) - packed.lower_scale;
  uint32_t values[2][2];
  load_shared(table + 8 * min(upper, kScaleSteps - 1), values[0]);
  load_shared(table + 8 * min(lower, kScaleSteps - 1), values[1]);
  unpack(packed.upper, values[0], 0, a);
  unpack(packed.lower, values[1], 1, a);
}

__device__ __forceinline__ void dots(const uint32_t (&a)[4][4], uint64_t tile, float (&d)[32]) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a[k], tile + 2 * k, k > 0);
  wgmma_commit();
}

// This thread's part of sum_h w_h relu(d_h) of its two rows, times two.
// relu(x) = (x + |x|) / 2: two FMAs, where a maximum would go to the integer pipe that unpacks, and NaN stays NaN.
template <typename Weight>
__device__ __forceinline__ void weigh(const float (&d)[32], Weight weight, float (&total)[2]) {
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
  total[0] = sum[0] + absolute[0];
  total[1] = sum[1] + absolute[1];
}

// Sums over the quad; lane 0 gets the first's upper row, 1 its lower, 2 and 3 those of the second.
__device__ __forceinline__ float reduce(const float (&first)[2], const float (&second)[2]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const float a = (odd ? first[1] : first[0]) + __shfl_xor_sync(~0u, odd ? first[0] : first[1], 1);
  const float b = (odd ? second[1] : second[0]) + __shfl_xor_sync(~0u, odd ? second[0] : second[1], 1);
  return (high ? b : a) + __shfl_xor_sync(~0u, high ? a : b, 2);
}

}  // namespace index_score
