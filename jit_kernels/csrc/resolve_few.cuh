// Few selections (2,048 at most), of which every block has 32 or fewer. A block looks up its own and asks for the host
// rows that it misses. If it misses any it then looks all selections up by itself and finds all ranks and victims
// in shared memory, while the rows are on their way: nobody waits for anybody, but for one thing. What others still
// look at may change only once all blocks have arrived, which by then they have.
//
// Two requests that miss one entry both ask for its row, since they do not know of each other yet; one of them stores it.
#pragma once

namespace tier {

constexpr int kMostOwn = 32;

// Shared memory of a block, in this order.
struct FewShared {
  int* keys;       // [hash] units that are missed; -1: nobody
  int* places;     // [hash] lowest place of a selection that misses the unit: its owner
  int* leading;    // [hash] how far the unit is filled
  int* ranks;      // [hash] rank among the units that need a group
  int* victims;    // [selections]
  unsigned* hits;  // [groups / 32 rounded up] groups that this call selects
  uint8_t* rows;

  __device__ __forceinline__ FewShared(uint8_t* shared, int hash, int selections, int groups) {
    keys = reinterpret_cast<int*>(shared);
    places = keys + hash;
    leading = places + hash;
    ranks = leading + hash;
    victims = ranks + hash;
    hits = reinterpret_cast<unsigned*>(victims + selections);
    const size_t used = reinterpret_cast<uint8_t*>(hits + groups / 32 + 1) - shared;
    rows = shared + (used + 15) / 16 * 16;
  }
};

// What one lookup finds.
struct Found {
  int slot, state;
  bool miss, cold;
};

__device__ __forceinline__ Found look(const Tables& t, int entry, int word, int reach, int unit_size) {
  Found f = {-1, kAbsent, false, true};
  if (entry < kFirstRealEntry) return f;
  const int member = entry & (unit_size - 1), group = word & kGroupMask;
  f.cold = group == t.groups;
  f.slot = (group << t.shift) + member;
  f.state = word >> (kGroupBits + member) & 1 ? kValid : f.cold ? kAbsent : t.state[f.slot];
  f.miss = f.state == kAbsent && reach >= 1;
  if (f.state == kAbsent || f.state >= kWriting) f.slot = -1;
  return f;
}

// I: selections per thread.
template <int I, bool ROWS, bool WIDE>
__global__ void __launch_bounds__(1024, 1) resolve_few_kernel(const __grid_constant__ Resolve a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int parts[32];
  __shared__ u64 barrier;
  __shared__ int own_entry[kMostOwn], own_slot[kMostOwn];  // slot -1: no rows to store
  __shared__ unsigned own_members[kMostOwn];
  const Tables& t = a.t;
  const int tid = threadIdx.x, threads = blockDim.x, warp = tid >> 5;
  const int unit_size = WIDE ? 1 << t.shift : 1;
  const int hash = a.chunk_lanes;  // a power of two, at least twice the selections
  const FewShared s(shared, hash, a.selections, t.groups);
  const int own = (a.selections + gridDim.x - 1) / gridDim.x, first_own = blockIdx.x * own;

  const u64 call = load_relaxed(a.s.arrived) >> 16;
  const int step = *t.clock;
  Rows rows_coming(a.p, s.rows, &barrier, tid == 0);
  // This block's own.
  bool missed = false;
  if (warp == 0) {
    const int place = first_own + tid;
    const bool mine = tid < own && place < a.selections;
    const int entry = mine ? a.entries[place] : -1;
    const int reach = mine ? a.lens[place / a.top_k] - a.positions[place] : 0;
    const bool real = entry >= kFirstRealEntry;
    const int word = load_relaxed(t.unit_group + (real ? entry >> t.shift : t.units));
    const Found f = look(t, entry, word, reach, unit_size);
    if (ROWS && !WIDE && f.miss) rows_coming.ask(entry, tid);
    own_slot[tid] = -1;
    missed = f.miss;
    if (mine && !f.miss) a.slots[place] = f.slot;
    if (!f.cold) {
      store_relaxed(t.held + (word & kGroupMask), held_in(step));
      t.last_used[word & kGroupMask] = step;
    }
    if (real && f.state >= kWriting) report(a.s, kEarly, entry, 0, step);
    if (real && f.state == kAbsent && !f.miss) report(a.s, kBeyond, entry, 0, step);
    const int selected = __popc(__ballot_sync(~0u, real));
    const int valid = __popc(__ballot_sync(~0u, f.state == kValid));
    const int pending = __popc(__ballot_sync(~0u, f.state == kPending));
    const int missing = __popc(__ballot_sync(~0u, f.miss));
    u64* counts = reinterpret_cast<u64*>(a.counts);
    if (tid == 0) {
      if (selected) atomicAdd(counts + kSelected, (u64)selected);
      if (valid) atomicAdd(counts + kValid, (u64)valid);
      if (pending) atomicAdd(counts + kPending, (u64)pending);
      if (missing) atomicAdd(counts + kMisses, (u64)missing);
      if (!ROWS && blockIdx.x == 0) {
        *a.fetch_count = 0;
        __threadfence();  // before this block arrives, and others may write the count
      }
    }
    if (f.state == (kValid | kPending)) atomicAdd(counts + (kValid | kPending), 1ull);
  }
  // What a block has looked at it has in registers: nothing to fence.
  auto arrive = [&] {
    if (tid == 0) atomicAdd(a.s.arrived, blockIdx.x == 0 ? 65536ull - (gridDim.x - 1) : 1ull);
  };
  if (!__syncthreads_or(missed)) {
    arrive();
    return;
  }

  // Everybody's.
  int entry[I], reach[I], word[I];
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int place = i * threads + tid;
    const bool mine = place < a.selections;
    entry[i] = mine ? a.entries[place] : -1;
    reach[i] = mine ? a.lens[place / a.top_k] - a.positions[place] : 0;
  }
#pragma unroll
  for (int i = 0; i < I; ++i)
    word[i] = load_relaxed(t.unit_group + (entry[i] >= kFirstRealEntry ? entry[i] >> t.shift : t.units));
  for (int h = tid; h < hash; h += threads) {
    s.keys[h] = -1;
    s.places[h] = 0x7fffffff;
    if (WIDE) s.leading[h] = 0;
  }
  for (int g = tid; g <= t.groups / 32; g += threads) s.hits[g] = 0;
  __syncthreads();
  bool miss[I];
  int at[I];
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const Found f = look(t, entry[i], word[i], reach[i], unit_size);
    const int unit = entry[i] >> t.shift, group = word[i] & kGroupMask;
    miss[i] = f.miss;
    if (!f.cold) atomicOr(s.hits + group / 32, 1u << group % 32);
    if (!f.miss) continue;
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
  int needed = 0, rows = 0;
  bool owner[I], takes[I];
  unsigned members[I];
  int rows_before[I];
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int place = i * threads + tid, group = word[i] & kGroupMask;
    owner[i] = miss[i] && s.places[at[i]] == place;
    takes[i] = owner[i] && group == t.groups;
    members[i] = owner[i] ? 1 : 0;
    if (WIDE && owner[i]) {
      unsigned there = 0;
      if (!takes[i])
        for (int m = 0; m < unit_size; ++m)
          if (t.state[((int64_t)group << t.shift) + m] != kAbsent) there |= 1u << m;
      members[i] = ((1u << s.leading[at[i]]) - 1) & ~there;
    }
    int total;
    // Both counts in one: at most 2,048 groups and 16,384 rows.
    const int before = block_scan(__popc(members[i]) << 16 | (takes[i] ? 1 : 0), parts, total);
    if (takes[i]) s.ranks[at[i]] = needed + (before & 0xffff);
    rows_before[i] = rows + (before >> 16);
    needed += total & 0xffff;
    rows += total >> 16;
    const int number = place - first_own;
    if (ROWS && owner[i] && number >= 0 && number < own) {
      own_entry[number] = entry[i] & -unit_size;
      own_members[number] = members[i];
      if (WIDE)
        for (unsigned m = members[i]; m; m &= m - 1)
          rows_coming.ask(own_entry[number] + __ffs(m) - 1, number * unit_size + __ffs(m) - 1);
    }
  }
  __syncthreads();
  arrive();
  if (ROWS && tid == 0) rows_coming.arrive();

  // Victims of all ranks.
  const int* queue = a.s.queue + (int64_t)(step & 1) * t.groups;
  constexpr int kPlaces = 2;
  int seen = 0;
  for (int start = 0; seen < needed && start < t.groups; start += threads * kPlaces) {
    int group[kPlaces], total;
    unsigned bits = replaceable(t, queue, start + tid * kPlaces, step, a.in_flight, (int)call, group);
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
  u64* counts = reinterpret_cast<u64*>(a.counts);
  if (seen < needed) {
    if (tid == 0) report(a.s, kTooFew, needed, seen, step);
    if (ROWS) rows_coming.wait();  // a block must not leave under its copies
    return;
  }

  // This block's own again: slots, tables, rows.
#pragma unroll
  for (int i = 0; i < I; ++i) {
    const int place = i * threads + tid, number = place - first_own, unit = entry[i] >> t.shift;
    if (!miss[i] || number < 0 || number >= own) continue;
    const int was = word[i] & kGroupMask;
    const int group = was == t.groups ? s.victims[s.ranks[at[i]]] : was;
    a.slots[place] = (group << t.shift) + (entry[i] & (unit_size - 1));
    if (!owner[i]) continue;
    if (ROWS) own_slot[number] = group << t.shift;
    const int old = takes[i] ? t.group_tag[group] : t.units;
    while (load_relaxed(a.s.arrived) >> 16 == call) {
    }
    if (takes[i]) {
      store_relaxed(t.held + group, held_in(step) | (unsigned)call);
      if (old < t.units) {
        store_relaxed(t.unit_group + old, t.groups);
        atomicAdd(counts + kReplaced, 1ull);
      }
      t.group_tag[group] = unit;
      t.last_used[group] = step;
    }
    const int valid_members = (takes[i] ? 0 : word[i] & ~kGroupMask) | (ROWS ? members[i] << kGroupBits : 0);
    store_relaxed(t.unit_group + unit, group | valid_members);
    if (!ROWS && a.in_flight) __threadfence();  // `held` before PENDING, at both of which others may still look
    int list = rows_before[i];
    for (int m = 0; m < unit_size; ++m) {
      const int64_t slot = ((int64_t)group << t.shift) + m;
      if (members[i] >> m & 1) {
        t.state[slot] = ROWS ? kValid : kPending;
        if (!ROWS) {
          a.fetch_entries[list] = (unit << t.shift) + m;
          a.fetch_slots[list++] = (int)slot;
        }
      } else if (takes[i]) {
        t.state[slot] = kAbsent;
      }
    }
    atomicAdd(counts + kFetched, (u64)__popc(members[i]));
    if (!ROWS && rows_before[i] == 0) *a.fetch_count = rows;
  }
  if constexpr (ROWS) {
    __syncthreads();
    rows_coming.wait();
    for (int row = warp; row < own * unit_size; row += threads / 32) {
      const int number = row / unit_size, member = row % unit_size;
      if (own_slot[number] >= 0 && (own_members[number] >> member & 1))
        rows_coming.put(own_entry[number] + member, row, own_slot[number] + member);
    }
  }
}

}  // namespace tier
