// Few selections (2,048 at most): every block looks all of them up and finds all ranks and victims by itself, in
// shared memory, so that reading host rows waits for nobody. Blocks share the rows, the slots and the marks among
// them; and before a block changes what the others look at, all have arrived, which by then they have.
#pragma once

namespace tier {

// Shared memory of a block, in this order; rows on their way come last.
struct FewShared {
  int* keys;        // [hash] units that are missed; -1: nobody
  int* places;      // [hash] lowest place of a selection that misses the unit: its owner
  int* leading;     // [hash] how far the unit is filled
  int* ranks;       // [hash] rank among the units that need a group
  int* owned;       // [selections] units by owner
  int* owned_group; // [selections] group, or -1 - rank
  int* owned_members;
  int* owned_rows;  // [selections] rows before the owner's
  int* victims;     // [selections]
  unsigned* hits;   // [groups / 32 rounded up] groups that this call selects
  uint8_t* rows;
};

__device__ __forceinline__ FewShared few_shared(uint8_t* shared, int hash, int selections, int groups) {
  FewShared s;
  int* next = reinterpret_cast<int*>(shared);
  auto take = [&](int count) {
    int* mine = next;
    next += count;
    return mine;
  };
  s.keys = take(hash);
  s.places = take(hash);
  s.leading = take(hash);
  s.ranks = take(hash);
  s.owned = take(selections);
  s.owned_group = take(selections);
  s.owned_members = take(selections);
  s.owned_rows = take(selections);
  s.victims = take(selections);
  s.hits = reinterpret_cast<unsigned*>(take((groups + 31) / 32 + 1));
  const size_t used = (uint8_t*)next - shared;
  s.rows = shared + (used + 15) / 16 * 16;
  return s;
}

// I: selections per thread.
template <int I, bool ROWS, bool WIDE>
__global__ void __launch_bounds__(1024, 1) resolve_few_kernel(const __grid_constant__ Resolve a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int parts[32];
  const Tables& t = a.t;
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, warp = tid >> 5;
  const int unit_size = WIDE ? 1 << t.shift : 1;
  const int hash = a.chunk_lanes;  // a power of two, at least twice the selections
  const FewShared s = few_shared(shared, hash, a.selections, t.groups);
  const int per_block = (a.selections + gridDim.x - 1) / gridDim.x;

  const u64 call = load_relaxed(a.s.arrived) >> 16;
  int entry[I], reach[I], word[I];
  bool here[I];  // this block's to write slots and marks of
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int place = i * threads + tid;
    const bool mine = place < a.selections;
    entry[i] = mine ? a.entries[place] : -1;
    reach[i] = mine ? a.lens[place / a.top_k] - a.positions[place] : 0;
    here[i] = mine && place / per_block == blockIdx.x;
  }
  const int step = *t.clock;
#pragma unroll
  for (int i = 0; i < I; ++i)
    word[i] = load_relaxed(t.unit_group + (entry[i] >= kFirstRealEntry ? entry[i] >> t.shift : t.units));
  // Under the loads' latency.
  for (int h = tid; h < hash; h += threads) {
    s.keys[h] = -1;
    s.places[h] = 0x7fffffff;
    if (WIDE) s.leading[h] = 0;
  }
  for (int g = tid; g <= t.groups / 32; g += threads) s.hits[g] = 0;

  bool miss[I];
  int missing = 0, selected = 0, valid = 0, pending = 0;
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int place = i * threads + tid;
    const bool real = entry[i] >= kFirstRealEntry;
    const int member = entry[i] & (unit_size - 1), group = word[i] & kGroupMask;
    const bool cold = group == t.groups;
    int slot = -1, state = kAbsent;
    miss[i] = false;
    if (real) {
      slot = (group << t.shift) + member;
      state = word[i] >> (kGroupBits + member) & 1 ? kValid : cold ? kAbsent : t.state[slot];
      if (!cold && here[i]) {
        store_relaxed(t.held + group, held_in(step));
        t.last_used[group] = step;
      }
      if (state >= kWriting) {
        if (here[i]) report(a.s, kEarly, entry[i], 0, step);
        slot = -1;
      } else if (state == kAbsent) {
        miss[i] = reach[i] >= 1;
        if (!miss[i] && here[i]) report(a.s, kBeyond, entry[i], 0, step);
        slot = -1;
      }
    }
    if (here[i] && !miss[i]) a.slots[place] = slot;
    missing += __syncthreads_count(miss[i]);
    if (blockIdx.x == 0) {
      selected += __syncthreads_count(real);
      valid += __syncthreads_count(state == kValid);
      pending += __syncthreads_count(state == kPending);
      if (state == (kValid | kPending)) atomicAdd((u64*)a.counts + (kValid | kPending), 1ull);
    }
  }
  u64* counts = reinterpret_cast<u64*>(a.counts);
  if (blockIdx.x == 0 && tid == 0) {
    if (selected) atomicAdd(counts + kSelected, (u64)selected);
    if (valid) atomicAdd(counts + kValid, (u64)valid);
    if (pending) atomicAdd(counts + kPending, (u64)pending);
    if (missing) atomicAdd(counts + kMisses, (u64)missing);
    if (!ROWS && !missing) *a.fetch_count = 0;
  }
  // What a block has looked at it has in registers: nothing to fence.
  auto arrive = [&] {
    if (tid == 0) atomicAdd(a.s.arrived, blockIdx.x == 0 ? 65536ull - (gridDim.x - 1) : 1ull);
  };
  if (!missing) {
    arrive();
    return;
  }

  int at[I];
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int unit = entry[i] >> t.shift, group = word[i] & kGroupMask;
    if (entry[i] >= kFirstRealEntry && group != t.groups) atomicOr(s.hits + group / 32, 1u << group % 32);
    if (!miss[i]) continue;
    int h = (int)((unsigned)unit * 2654435761u >> 7 & (hash - 1));
    for (;;) {
      const int old = atomicCAS(s.keys + h, -1, unit);
      if (old == -1 || old == unit) break;
      h = (h + 1) & (hash - 1);
    }
    at[i] = h;
    atomicMin(s.places + h, i * threads + tid);
    if (WIDE) atomicMax(s.leading + h, min((entry[i] & (unit_size - 1)) + reach[i], unit_size));
  }
  __syncthreads();
  int owners = 0, needed = 0, rows = 0;
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const bool owner = miss[i] && s.places[at[i]] == i * threads + tid;
    const int group = word[i] & kGroupMask;
    const bool takes = owner && group == t.groups;
    unsigned members = owner ? 1 : 0;
    if (WIDE && owner) {
      unsigned there = 0;
      if (!takes)
        for (int m = 0; m < unit_size; ++m)
          if (t.state[((int64_t)group << t.shift) + m] != kAbsent) there |= 1u << m;
      members = ((1u << s.leading[at[i]]) - 1) & ~there;
    }
    int total;
    const int before = block_scan((owner ? 1 : 0) | (takes ? 1 << 16 : 0), parts, total);
    const int q = owners + (before & 0xffff), rank = needed + (before >> 16);
    owners += total & 0xffff;
    needed += total >> 16;
    if (owner) {
      s.owned[q] = entry[i] >> t.shift;
      s.owned_group[q] = takes ? -1 - rank : word[i];
      s.owned_members[q] = members;
      if (takes) s.ranks[at[i]] = rank;
    }
    if (WIDE || !ROWS) {
      const int rows_before = block_scan(__popc(members), parts, total);
      if (owner) s.owned_rows[q] = rows + rows_before;
      rows += total;
    }
  }
  if (!WIDE && ROWS) rows = owners;
  __syncthreads();

  // Owners' rows are dealt out to blocks, then warps.
  uint8_t* buffer = s.rows + (size_t)warp * a.buffered_rows * (a.p.value_bytes + a.p.scale_bytes);
  const int row_bytes = a.p.value_bytes + a.p.scale_bytes;
  const int first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * (threads / 32);
  // The owner's rows from the from-th on, as many as fit; returns how many it has.
  auto issue = [&](int q, int from) {
    int k = 0;
    for (unsigned m = s.owned_members[q]; m; m &= m - 1, ++k)
      if (k >= from && k < from + a.buffered_rows)
        read_row(a.p, (s.owned[q] << t.shift) + __ffs(m) - 1, buffer + (size_t)(k - from) * row_bytes);
    return k;
  };
  if (ROWS && first < owners) issue(first, 0);

  // Victims of all ranks.
  const int* queue = a.s.queue + (int64_t)(step & 1) * t.groups;
  constexpr int kPlaces = 2;
  int seen = 0;
  for (int start = 0; seen < needed && start < t.groups; start += threads * kPlaces) {
    int group[kPlaces], total;
    unsigned bits = replaceable(t, queue, start + tid * kPlaces, step, a.in_flight, 0, group);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k)
      if (s.hits[group[k] / 32] >> group[k] % 32 & 1) bits &= ~(1u << k);
    int rank = seen + block_scan(__popc(bits), parts, total);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k)
      if (bits >> k & 1) {
        if (rank < needed) s.victims[rank] = group[k];
        ++rank;
      }
    seen += total;
  }
  __syncthreads();
  arrive();
  if (seen < needed) {
    if (tid == 0 && blockIdx.x == 0) report(a.s, kTooFew, needed, seen, step);
    return;
  }
#pragma unroll
  for (int i = 0; i < I; ++i) {
    if (!miss[i] || !here[i]) continue;
    const int group = (word[i] & kGroupMask) == t.groups ? s.victims[s.ranks[at[i]]] : word[i] & kGroupMask;
    a.slots[i * threads + tid] = (group << t.shift) + (entry[i] & (unit_size - 1));
  }
  if (blockIdx.x == 0 && tid == 0) {
    atomicAdd(counts + kFetched, (u64)rows);
    if (!ROWS) *a.fetch_count = rows;
  }
  int replaced = 0;
  for (int q = first; q < owners; q += stride) {
    if (ROWS && q != first) issue(q, 0);
    const bool takes = s.owned_group[q] < 0;
    const int group = takes ? s.victims[-1 - s.owned_group[q]] : s.owned_group[q] & kGroupMask;
    const unsigned members = s.owned_members[q];
    const int unit = s.owned[q];
    if (lane == 0) {
      const int old = takes ? t.group_tag[group] : t.units;
      while (load_relaxed(a.s.arrived) >> 16 == call) {
      }
      if (takes) {
        if (old < t.units) {
          store_relaxed(t.unit_group + old, t.groups);
          ++replaced;
        }
        t.group_tag[group] = unit;
        store_relaxed(t.held + group, held_in(step));
        t.last_used[group] = step;
      }
      const int valid_members = (takes ? 0 : s.owned_group[q] & ~kGroupMask) | (ROWS ? members << kGroupBits : 0);
      store_relaxed(t.unit_group + unit, group | valid_members);
    }
    __syncwarp();  // lane 0 has waited for all blocks
    if (lane < unit_size) {
      const int64_t slot = ((int64_t)group << t.shift) + lane;
      if (members >> lane & 1)
        t.state[slot] = ROWS ? kValid : kPending;
      else if (takes)
        t.state[slot] = kAbsent;
      if (!ROWS && (members >> lane & 1)) {
        const int place = s.owned_rows[q] + __popc(members & ((1u << lane) - 1));
        a.fetch_entries[place] = (unit << t.shift) + lane;
        a.fetch_slots[place] = (int)slot;
      }
    }
    __syncwarp();
    if (!ROWS) continue;
    const int count = __popc(members);
    for (int from = 0; from < count; from += a.buffered_rows) {
      if (from) issue(q, from);
      wait_rows();
      int k = 0;
      for (unsigned m = members; m; m &= m - 1, ++k)
        if (k >= from && k < from + a.buffered_rows)
          write_slot(a.p, (group << t.shift) + __ffs(m) - 1, buffer + (size_t)(k - from) * row_bytes);
      __syncwarp();
    }
  }
  if (replaced) atomicAdd(counts + kReplaced, (u64)replaced);
}

}  // namespace tier
