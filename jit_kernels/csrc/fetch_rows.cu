// Host rows into slots by many blocks, straight from pinned memory (a grid-wide zero-copy gather), and the end
// of such a fetch in the tables. How many rows there are is read on the device.

#include "tier_tables.cuh"

namespace tier {

struct Fetch {
  Pages p;
  const int* entries;
  const int* slots;
  const int* count;
  int most;
};

constexpr int kWordsInFlight = 4;  // 8-byte words that a lane asks for before it stores the first

// A warp moves a row at a time.
__global__ void __launch_bounds__(256) fetch_rows_kernel(const __grid_constant__ Fetch a) {
  const int lane = threadIdx.x & 31;
  const int value_words = a.p.value_bytes / 8, words = value_words + a.p.scale_bytes / 8;
  const int total = gridDim.x * (blockDim.x >> 5);
  // Warps next to each other lie in different blocks, so that few rows spread over many multiprocessors.
  int row = (threadIdx.x >> 5) * gridDim.x + blockIdx.x;
  const int known = row < a.most ? row : 0;
  int entry = a.entries[known], slot = a.slots[known];  // beside the count, not behind it
  const int count = a.count ? min(*a.count, a.most) : a.most;
  while (row < count) {
    const u64* from = reinterpret_cast<const u64*>(a.p.host_rows + (int64_t)entry * a.p.host_stride);
    uint8_t* page = a.p.pages + (int64_t)(slot / kEntriesPerPage) * a.p.page_bytes;
    u64* values = reinterpret_cast<u64*>(page + (slot % kEntriesPerPage) * a.p.value_bytes);
    u64* scales = reinterpret_cast<u64*>(
        page + kEntriesPerPage * a.p.value_bytes + (slot % kEntriesPerPage) * a.p.scale_bytes);
    for (int base = 0; base < words; base += 32 * kWordsInFlight) {
      u64 v[kWordsInFlight];
#pragma unroll
      for (int k = 0; k < kWordsInFlight; ++k) {
        const int i = base + k * 32 + lane;
        if (i < words) v[k] = __ldcs(from + i);
      }
#pragma unroll
      for (int k = 0; k < kWordsInFlight; ++k) {
        const int i = base + k * 32 + lane;
        if (i < value_words) values[i] = v[k];
        else if (i < words) scales[i - value_words] = v[k];
      }
    }
    row += total;
    if (row < count) {
      entry = a.entries[row];
      slot = a.slots[row];
    }
  }
}

struct Finish {
  Tables t;
  const int* slots;
  const int* count;
  int most;
};

__global__ void finish_fetch_kernel(const __grid_constant__ Finish a) {
  const Tables& t = a.t;
  const int count = a.count ? min(*a.count, a.most) : a.most;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const int slot = a.slots[i];
    if (t.state[slot] & kWriting) {
      t.state[slot] = kWriting;  // what arrived are bytes of the location's previous owner
      continue;
    }
    t.state[slot] = kValid;
    const int member = slot & ((1 << t.shift) - 1);
    atomicOr(t.unit_group + t.group_tag[slot >> t.shift], 1 << (kGroupBits + member));
  }
}

}  // namespace tier

extern "C" int tier_fetch_rows(const tier::Fetch* a, int blocks, int threads, void* stream) {
  tier::fetch_rows_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*a);
  return cudaGetLastError();
}

extern "C" int tier_finish_fetch(const tier::Finish* a, int blocks, int threads, void* stream) {
  tier::finish_fetch_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*a);
  return cudaGetLastError();
}

// Loads the kernels now, so that neither a first request nor a graph's capture does.
extern "C" int tier_prepare() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::fetch_rows_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tier::finish_fetch_kernel);
  return error;
}
