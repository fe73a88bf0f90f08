// The tiered cache's tables on the device, as jit_kernels/resolve.py defines them, and what its kernels share.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace tier {

constexpr int kAbsent = 0, kValid = 1, kPending = 2, kWriting = 4;
constexpr int kFirstRealEntry = 64;  // page 0 is SGLang's dummy
constexpr int kEntriesPerPage = 64;
constexpr int kGroupBits = 23;
constexpr int kGroupMask = (1 << kGroupBits) - 1;
constexpr int kFree = -1;

// Columns of a layer's counters, as hicache/counters.py reads them.
constexpr int kSelected = 8, kMisses = 9, kReplaced = 10, kFetched = 11, kWritten = 12;

// What jit_kernels/resolve_cuda.py turns into an error.
enum Fault { kNoFault = 0, kTooFew = 1, kEarly = 2, kBeyond = 3, kNotAnnounced = 4 };

using u64 = unsigned long long;

// One layer. Strides between layers let a kernel serve all of them.
struct Tables {
  int* unit_group;
  int* group_tag;
  int* last_used;
  long long* held;  // step << 32 | call that gave the group away, 0 for any other reason
  uint8_t* state;
  int* clock;
  int groups, units, shift;
  int layers;
};

struct Scratch {
  int* queue;          // [layers, 2, groups]: groups, unused longest first; which of two: clock & 1
  int* class_counts;   // [layers, blocks, 4]
  int* previous_clock; // [1]
  u64* claims;         // [units + 1]
  u64* leading;        // [units + 1]
  u64* chunk_counts;   // [chunks]
  u64* arrived;        // [1]
  int* failed;         // [1], set with the first fault
  volatile int* fault; // [4] in pinned host memory: kind, entry or groups needed, groups there are, step
};

struct Pages {
  uint8_t* pages;
  uint8_t* host_rows;
  int64_t host_stride;  // bytes from one host row to the next
  int page_bytes, value_bytes, scale_bytes;
};

__device__ __forceinline__ void report(const Scratch& s, int kind, int what, int there, int step) {
  if (atomicCAS(s.failed, 0, kind) == 0) {
    s.fault[1] = what;
    s.fault[2] = there;
    s.fault[3] = step;
    __threadfence_system();
    s.fault[0] = kind;
  }
}

__device__ __forceinline__ void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ int load_relaxed(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ long long load_relaxed(const long long* p) {
  long long v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(long long* p, long long v) {
  asm volatile("st.relaxed.gpu.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed(int* p, int v) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ unsigned lanes_below() {
  unsigned m;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(m));
  return m;
}

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int warp_scan(int v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(~0u, v, d);
    if ((threadIdx.x & 31) >= d) v += other;
  }
  return v;
}

// All threads of a block; `parts` has 32 places. Returns the sum before this thread and, in `total`, of all.
__device__ __forceinline__ int block_scan(int v, int* parts, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  const int inside = warp_scan(v);
  if (lane == 31) parts[warp] = inside;
  __syncthreads();
  const int part = lane < warps ? parts[lane] : 0;
  const int before = warp_scan(part);
  total = __shfl_sync(~0u, before, warps - 1);
  const int mine = __shfl_sync(~0u, before - part, warp);
  __syncthreads();
  return mine + inside - v;
}

__device__ __forceinline__ bool any_pending(const Tables& t, int group) {
  const int unit = 1 << t.shift;
  const volatile uint8_t* state = t.state + ((int64_t)group << t.shift);
  for (int m = 0; m < unit; ++m)
    if (state[m] & kPending) return true;
  return false;
}

constexpr int kPerThread = 8;  // places of the queue that a thread looks at in one go

__device__ __forceinline__ long long held_in(int step) { return (long long)step << 32; }

// Groups of N places of the queue from `place` on, and which of them may be replaced in this step, as bits. Other
// blocks of the same call may be giving groups away already: those count all the same, so that every block sees the
// ranks that the call began with. Whoever takes a group notes the call in `held` before anything else that is looked
// at here. call 0: nobody else is at it. All loads are on their way before the first is looked at.
template <int N>
__device__ __forceinline__ unsigned replaceable(
    const Tables& t, const int* queue, int place, int step, bool in_flight, int call, int (&group)[N]) {
  long long held[N];
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) group[i] = queue[min(place + i, t.groups - 1)];
#pragma unroll
  for (int i = 0; i < N; ++i) held[i] = load_relaxed(t.held + group[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool taken_now = call != 0 && (int)(held[i] >> 32) == step && (int)held[i] == call;
    if (place + i < t.groups && (held[i] < held_in(step) || taken_now)) bits |= 1u << i;
  }
  if (in_flight) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!(bits >> i & 1) || held[i] >= held_in(step) || !any_pending(t, group[i])) continue;
      __threadfence();
      const long long again = load_relaxed(t.held + group[i]);
      if (call == 0 || (int)(again >> 32) != step || (int)again != call) bits &= ~(1u << i);
    }
  }
  return bits;
}

}  // namespace tier
