// Start of a step: the order in which groups may be replaced, and slots for the entries that the step writes;
// then each layer's write, to its slots and through to its host rows.
//
// The queue holds every group, unused longest first, the lower number first among equals. Within a step nothing
// that may still be replaced changes its place, so one queue serves all of the step: whoever claims skips what
// the step has held. From step to step only the groups that the last step touched move, so that the new queue is
// the old one without them, with them put where their age says, and nothing is sorted:
//   free | written by a prefill that does not use it again (0) | untouched since before | used in the last step
// The first, second and last part come from a scan over group numbers, the third from a scan over the old queue.

#include "tier_tables.cuh"

namespace tier {

struct Step {
  Tables t;  // of layer 0
  Scratch s;
  const int64_t* entries;
  const uint8_t* used_again;  // or null: all
  int64_t* counts;
  int count_columns;
  int writes;
  int in_flight;
};

constexpr int kThreads = 1024;
constexpr int kStretch = kThreads * kPerThread;

__device__ __forceinline__ Tables layer_of(const Tables& t, int layer) {
  Tables mine = t;
  mine.unit_group += (int64_t)layer * (t.units + 1);
  mine.group_tag += (int64_t)layer * (t.groups + 1);
  mine.last_used += (int64_t)layer * (t.groups + 1);
  mine.held += (int64_t)layer * (t.groups + 1);
  mine.state += ((int64_t)layer * (t.groups + 1)) << t.shift;
  return mine;
}

// Part of the queue that a group with this age belongs to; -1: the third, which the old queue orders.
__device__ __forceinline__ int part_of(int age, int last_step) {
  return age == kFree ? 0 : age == 0 ? 1 : age == last_step ? 3 : -1;
}

template <bool PLACE>
__global__ void __launch_bounds__(kThreads) order_kernel(const __grid_constant__ Step a) {
  __shared__ int parts[32];
  __shared__ int base[4];
  const Tables t = layer_of(a.t, blockIdx.y);
  const int last_step = PLACE ? *a.s.previous_clock : *t.clock;
  const int* old_queue = a.s.queue + ((int64_t)blockIdx.y * 2 + (last_step & 1)) * t.groups;
  int* new_queue = a.s.queue + ((int64_t)blockIdx.y * 2 + (~last_step & 1)) * t.groups;
  int* sums = a.s.class_counts + (int64_t)blockIdx.y * gridDim.x * 4;
  if (threadIdx.x < 4 && PLACE) {
    int before = 0;
    for (int c = 0; c <= threadIdx.x; ++c)
      for (int b = 0; b < (c < threadIdx.x ? gridDim.x : blockIdx.x); ++b) before += sums[b * 4 + c];
    base[threadIdx.x] = before;
  }
  __syncthreads();
  const int first = blockIdx.x * kStretch + threadIdx.x * kPerThread;
  int group[kPerThread], part[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    part[i] = first + i < t.groups ? part_of(t.last_used[first + i], last_step) : -1;
    group[i] = first + i < t.groups ? old_queue[first + i] : -1;
  }
  unsigned untouched = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (group[i] >= 0 && part_of(t.last_used[group[i]], last_step) < 0) untouched |= 1u << i;
  for (int c = 0; c < 4; ++c) {
    int mine = c == 2 ? __popc(untouched) : 0;
    if (c != 2)
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) mine += part[i] == c;
    int total;
    int at = block_scan(mine, parts, total);
    if (!PLACE) {
      if (threadIdx.x == 0) sums[blockIdx.x * 4 + c] = total;
      continue;
    }
    at += base[c];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (c == 2 && (untouched >> i & 1)) new_queue[at++] = group[i];
      if (c != 2 && part[i] == c) new_queue[at++] = first + i;
    }
  }
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    if (PLACE) *t.clock = last_step + 1;
    else *a.s.previous_clock = last_step;
  }
}

// One block per layer, one thread per write.
__global__ void __launch_bounds__(kThreads) claim_writes_kernel(const __grid_constant__ Step a) {
  __shared__ int units[kThreads];
  __shared__ bool colds[kThreads], again[kThreads];
  __shared__ int victims[kThreads];
  __shared__ int parts[32];
  const Tables t = layer_of(a.t, blockIdx.x);
  const int step = *t.clock;
  const int i = threadIdx.x;
  const int64_t entry = i < a.writes ? a.entries[i] : 0;
  const bool real = entry >= kFirstRealEntry;
  const int unit = real ? (int)(entry >> t.shift) : -1;
  const int word = real ? t.unit_group[unit] : t.groups;
  int group = word & kGroupMask;
  units[i] = unit;
  again[i] = real && (!a.used_again || a.used_again[i]);
  __syncthreads();
  bool first = real, used = false;
  for (int j = 0; j < a.writes; ++j) {
    if (units[j] != unit) continue;
    if (j < i) first = false;
    used |= again[j];
  }
  const bool takes = first && group == t.groups;
  colds[i] = takes;
  if (first && !takes) t.held[group] = held_in(step);
  const int needed = __syncthreads_count(takes);
  int rank = 0;
  if (takes)
    for (int j = 0; j < a.writes; ++j) rank += colds[j] && units[j] < unit;
  const int* queue = a.s.queue + ((int64_t)blockIdx.x * 2 + (step & 1)) * t.groups;
  int seen = 0;
  for (int start = 0; seen < needed && start < t.groups; start += blockDim.x * kPerThread) {
    int candidates[kPerThread];
    const unsigned bits = replaceable(t, queue, start + i * kPerThread, step, a.in_flight, 0, candidates);
    int total;
    int at = seen + block_scan(__popc(bits), parts, total);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k)
      if (bits >> k & 1) {
        if (at < needed) victims[at] = candidates[k];
        ++at;
      }
    seen += total;
  }
  __syncthreads();
  if (seen < needed) {
    if (i == 0) report(a.s, kTooFew, needed, seen, step);
    return;
  }
  bool replaced = false;
  if (first) {
    if (takes) {
      group = victims[rank];
      const int old = t.group_tag[group];
      replaced = old < t.units;
      if (replaced) store_relaxed(t.unit_group + old, t.groups);
      t.group_tag[group] = unit;
      store_relaxed(t.unit_group + unit, group);
      for (int m = 0; m < 1 << t.shift; ++m) t.state[((int64_t)group << t.shift) + m] = kAbsent;
      t.held[group] = held_in(step);
      t.last_used[group] = used ? step : 0;
    } else if (used) {
      t.last_used[group] = step;
    }
  }
  const int lost = __syncthreads_count(replaced);
  if (i == 0 && lost) atomicAdd((u64*)a.counts + (int64_t)blockIdx.x * a.count_columns + kReplaced, (u64)lost);
  if (real) {
    group = load_relaxed(t.unit_group + unit) & kGroupMask;
    const int member = (int)entry & ((1 << t.shift) - 1);
    const int64_t slot = ((int64_t)group << t.shift) + member;
    t.state[slot] = (t.state[slot] & kPending) | kWriting;
    atomicAnd(t.unit_group + unit, ~(1 << (kGroupBits + member)));
  }
}

struct Write {
  Tables t;
  Scratch s;
  Pages p;
  const int64_t* entries;
  const uint8_t* rows;
  int64_t* counts;
  int writes;
};

// A warp per row.
__global__ void write_rows_kernel(const __grid_constant__ Write a) {
  const Tables& t = a.t;
  const int lane = threadIdx.x & 31, row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (row >= a.writes) return;
  const int64_t entry = a.entries[row];
  if (entry < kFirstRealEntry) return;
  const int value_words = a.p.value_bytes / 8, words = value_words + a.p.scale_bytes / 8;
  const int unit = (int)(entry >> t.shift), member = (int)entry & ((1 << t.shift) - 1);
  const int64_t slot = ((int64_t)(load_relaxed(t.unit_group + unit) & kGroupMask) << t.shift) + member;
  const int state = t.state[slot];
  if (!(state & kWriting)) {
    if (lane == 0) report(a.s, kNotAnnounced, (int)entry, 0, *t.clock);
    return;
  }
  const u64* from = reinterpret_cast<const u64*>(a.rows) + (int64_t)row * words;
  uint8_t* page = a.p.pages + slot / kEntriesPerPage * a.p.page_bytes;
  u64* values = reinterpret_cast<u64*>(page + slot % kEntriesPerPage * a.p.value_bytes);
  u64* scales = reinterpret_cast<u64*>(
      page + kEntriesPerPage * a.p.value_bytes + slot % kEntriesPerPage * a.p.scale_bytes);
  u64* host = reinterpret_cast<u64*>(a.p.host_rows + entry * a.p.host_stride);
  for (int i = lane; i < words; i += 32) {
    const u64 v = from[i];
    host[i] = v;
    if (i < value_words) values[i] = v;
    else scales[i - value_words] = v;
  }
  __syncwarp();
  if (lane == 0) {
    const int now = (state & kPending) | kValid;
    t.state[slot] = now;
    if (now == kValid) atomicOr(t.unit_group + unit, 1 << (kGroupBits + member));
    atomicAdd((u64*)a.counts + kWritten, 1ull);
  }
}

}  // namespace tier

// `stretches`: blocks per layer that cover the groups, kStretch each.
extern "C" int tier_begin_step(const tier::Step* a, int stretches, int threads, void* stream) {
  using namespace tier;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const dim3 grid(stretches, a->t.layers);
  order_kernel<false><<<grid, kThreads, 0, s>>>(*a);
  order_kernel<true><<<grid, kThreads, 0, s>>>(*a);
  if (threads) claim_writes_kernel<<<a->t.layers, threads, 0, s>>>(*a);
  return cudaGetLastError();
}

extern "C" int tier_write_rows(const tier::Write* a, int blocks, int threads, void* stream) {
  tier::write_rows_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*a);
  return cudaGetLastError();
}

// Loads the kernels now, so that neither a first request nor a graph's capture does.
extern "C" int tier_prepare() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::order_kernel<false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::order_kernel<true>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::claim_writes_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::write_rows_kernel);
  return error;
}
