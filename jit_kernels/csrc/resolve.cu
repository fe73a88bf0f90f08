// Selected entries to slots, and the rows of what is missing from pinned host memory into them.
//
// One grid does it all, at most one block per multiprocessor, so that blocks can wait for each other:
//   1. Every lane looks one selection up; hits are marked as used and have their slot. A missing unit is claimed
//      with an atomic minimum over (call, place in the selection): whoever comes first starts to read the host
//      row into shared memory, whoever has the lowest place is its owner.
//   2. Blocks arrive at a barrier; those that miss nothing leave. From here on every hit is marked.
//   3. Owners are counted and ranked by their place. Rank r takes the r-th replaceable group of the queue that
//      claim_writes left: groups unused longest first, so the ranks get what the torch reference gives them.
//   4. Rows that have arrived go to their slots.
// Rows are on their way during 2 and 3. Nothing is sized by data on the host.
// Few selections take another kernel, resolve_few.cuh, whose blocks each look all of them up and so need no ranks
// from each other.

#include <type_traits>

#include "tier_tables.cuh"

namespace tier {

struct Resolve {
  Tables t;
  Scratch s;
  Pages p;
  const int* entries;
  const int* positions;
  const int* lens;
  int* slots;
  int* fetch_entries;  // without rows: what is to be fetched, and how many
  int* fetch_slots;
  int* fetch_count;
  int64_t* counts;
  int selections, top_k;
  int chunk_lanes;     // selections that a warp looks up at once
  int buffered_rows;   // rows that a warp's part of shared memory holds
  int in_flight;
};

// Rows on their way from pinned memory into shared memory. The bulk copy engine brings them: one lane asks for a row,
// and no register waits for the link. It moves whole 16 bytes from a multiple of 16 on, so that a row may lie 8
// bytes into its buffer, and bring up to 8 bytes of its neighbours with it.
struct Rows {
  const Pages& p;
  uint8_t* buffer;
  uint32_t barrier;
  unsigned phase;
  int row_bytes, stride;

  // `mine`: 8 bytes of shared memory of its own; `begins`: one thread of those that use it, in the warp that asks
  // first.
  __device__ __forceinline__ Rows(const Pages& pages, uint8_t* shared, u64* mine, bool begins)
      : p(pages), buffer(shared), barrier((uint32_t)__cvta_generic_to_shared(mine)), phase(0) {
    row_bytes = p.value_bytes + p.scale_bytes;
    stride = buffer_stride(row_bytes);
    if (begins) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }

  static __host__ __device__ __forceinline__ int buffer_stride(int row_bytes) { return (row_bytes + 8 + 15) / 16 * 16; }

  // One lane: asks for host row `entry`, to be the k-th of this batch.
  __device__ __forceinline__ void ask(int entry, int k) {
    const uint64_t from = reinterpret_cast<uint64_t>(p.host_rows) + (int64_t)entry * p.host_stride;
    const uint32_t size = (row_bytes + (uint32_t)(from & 15) + 15) / 16 * 16;
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(buffer) + k * stride;
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from & ~15ull), "r"(size), "r"(barrier)
        : "memory");
  }

  // One thread, once all that belong to the batch have been asked for.
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }

  // Until the batch has arrived.
  __device__ __forceinline__ void wait() {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(phase)
        : "memory");
    phase ^= 1;
  }

  // All lanes: the k-th row of the batch, which was asked for as `entry`, goes to its slot.
  __device__ __forceinline__ void put(int entry, int k, int slot) {
    const uint64_t from = reinterpret_cast<uint64_t>(p.host_rows) + (int64_t)entry * p.host_stride;
    const u64* row = reinterpret_cast<const u64*>(buffer + k * stride + (from & 15));
    uint8_t* page = p.pages + (int64_t)(slot / kEntriesPerPage) * p.page_bytes;
    u64* values = reinterpret_cast<u64*>(page + (slot % kEntriesPerPage) * p.value_bytes);
    u64* scales =
        reinterpret_cast<u64*>(page + kEntriesPerPage * p.value_bytes + (slot % kEntriesPerPage) * p.scale_bytes);
    const int value_words = p.value_bytes / 8, words = row_bytes / 8;
    for (int i = threadIdx.x & 31; i < words; i += 32) {
      if (i < value_words) values[i] = row[i];
      else scales[i - value_words] = row[i];
    }
  }

  // All lanes, before the next batch is asked for: the buffers have been read.
  __device__ __forceinline__ void again() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }
};

constexpr int kMostBlocks = 256;

// ROWS: read the rows too, so that the slots are valid at once. WIDE: more than one entry to a unit.
template <int J, bool ROWS, bool WIDE>
__global__ void __launch_bounds__(1024, 1) resolve_kernel(const __grid_constant__ Resolve a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ unsigned found[32];
  __shared__ int full[32], part[32], full_rows[32], part_rows[32];
  __shared__ int first_rank[33], first_place[33];
  __shared__ int parts[32];
  __shared__ u64 barriers[32];
  const Tables& t = a.t;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int chunk = warp * gridDim.x + blockIdx.x;
  const int lanes = a.chunk_lanes;
  const int unit_size = WIDE ? 1 << t.shift : 1;
  int* victims = reinterpret_cast<int*>(shared);
  Rows rows_coming(
      a.p,
      shared + blockDim.x * J * sizeof(int) +
          (size_t)warp * a.buffered_rows * Rows::buffer_stride(a.p.value_bytes + a.p.scale_bytes),
      barriers + warp, lane == 0);

  // 1. Look up.
  const u64 call = load_relaxed(a.s.arrived) >> 16;
  int entry[J], place[J], reach[J], word[J];
#pragma unroll
  for (int j = 0; j < J; ++j) {
    place[j] = chunk * (lanes * J) + j * lanes + lane;
    const bool mine = lane < lanes && place[j] < a.selections;
    entry[j] = mine ? a.entries[place[j]] : -1;
    reach[j] = mine ? a.lens[place[j] / a.top_k] - a.positions[place[j]] : 0;
    if (!mine) place[j] = -1;
  }
  const int step = *t.clock;
  const int* queue = a.s.queue + (int64_t)(step & 1) * t.groups;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const bool real = entry[j] >= kFirstRealEntry;
    // The spare unit is cold: a load without a branch, so that all are on their way at once.
    word[j] = load_relaxed(t.unit_group + (real ? entry[j] >> t.shift : t.units));
  }
  bool miss[J], reader[J];
  u64 key[J];
  unsigned selected = 0, valid = 0, pending = 0, missing = 0;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    miss[j] = reader[j] = false;
    const bool real = entry[j] >= kFirstRealEntry;
    const int member = entry[j] & (unit_size - 1);
    const int group = word[j] & kGroupMask;
    const bool cold = group == t.groups;
    int slot = -1, state = kAbsent;
    if (real) {
      slot = (group << t.shift) + member;
      const bool known = word[j] >> (kGroupBits + member) & 1;
      state = known ? kValid : cold ? kAbsent : t.state[slot];
      if (!cold) {
        t.held[group] = held_in(step);
        t.last_used[group] = step;
      }
      if (state >= kWriting) {
        report(a.s, kEarly, entry[j], 0, step);
        slot = -1;
      } else if (state == kAbsent) {
        if (reach[j] >= 1) {
          miss[j] = true;
        } else {
          report(a.s, kBeyond, entry[j], 0, step);
          slot = -1;
        }
      }
    }
    if (place[j] >= 0 && !miss[j]) a.slots[place[j]] = slot;
    selected += __popc(__ballot_sync(~0u, real));
    valid += __popc(__ballot_sync(~0u, state == kValid));
    pending += __popc(__ballot_sync(~0u, state == kPending));
    missing += __popc(__ballot_sync(~0u, miss[j]));
    if (state == (kValid | kPending)) atomicAdd((u64*)a.counts + (kValid | kPending), 1ull);
    if (miss[j]) {
      // A later call has a lower number, so that claims need no reset.
      key[j] = (~call << 24) | (unsigned)place[j];
      const int unit = entry[j] >> t.shift;
      if (WIDE) atomicMax(a.s.leading + unit, call << 4 | (unsigned)min(member + reach[j], unit_size));
      const u64 before = atomicMin(a.s.claims + unit, key[j]);
      reader[j] = before >> 24 != key[j] >> 24;
    }
  }
  if (lane == 0) {
    found[warp] = selected | valid << 8 | pending << 16 | missing << 24;
    if (!missing) store_relaxed(a.s.chunk_counts + chunk, call << 32);
  }
  if (!ROWS && threadIdx.x == 0 && blockIdx.x == 0) *a.fetch_count = 0;

  // Rows of this warp, counted in the order of their lanes and, in a unit, of its members: those from `from` on, as
  // many as there are buffers.
  unsigned members[J];
  auto ask_rows = [&](int from) {
    int before = 0;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const unsigned wanted = !reader[j] ? 0 : WIDE ? members[j] : 1;
      const int upto = warp_scan(__popc(wanted));
      int k = before + upto - __popc(wanted) - from;
      for (unsigned m = wanted; m; m &= m - 1, ++k)
        if (k >= 0 && k < a.buffered_rows)
          rows_coming.ask(WIDE ? (entry[j] & -unit_size) + __ffs(m) - 1 : entry[j], k);
      before += __shfl_sync(~0u, upto, 31);
    }
    __syncwarp();
    if (lane == 0) rows_coming.arrive();
  };

  // 2. Everybody's hits are marked and claims made once all blocks have arrived. No row is asked for until the fence
  // is through, which seems to wait for what other warps have on their way too: asking first cost 5 us at batch 4.
  const bool waits = __syncthreads_or(missing != 0);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(a.s.arrived, blockIdx.x == 0 ? 65536ull - (gridDim.x - 1) : 1ull);
  }
  if (ROWS && waits) __syncthreads();
  if (ROWS && !WIDE && missing) ask_rows(0);
  if (warp == 0) {
    const unsigned mine = lane < warps ? found[lane] : 0;
    const unsigned all = __reduce_add_sync(~0u, mine & 0xff), hits = __reduce_add_sync(~0u, mine >> 8 & 0xff);
    const unsigned flying = __reduce_add_sync(~0u, mine >> 16 & 0xff), cold = __reduce_add_sync(~0u, mine >> 24);
    if (lane == 0) {
      u64* counts = reinterpret_cast<u64*>(a.counts);
      if (all) atomicAdd(counts + kSelected, (u64)all);
      if (hits) atomicAdd(counts + kValid, (u64)hits);
      if (flying) atomicAdd(counts + kPending, (u64)flying);
      if (cold) atomicAdd(counts + kMisses, (u64)cold);
    }
  }
  if (!waits) return;
  // What others have written is read from L2 from here on: no fence, which would wait for the rows.
  if (threadIdx.x == 0)
    while (load_relaxed(a.s.arrived) >> 16 == call) {
    }
  __syncthreads();

  // 3. Owners, their ranks, their groups.
  bool owner[J], takes[J];
  int local_rank[J], local_place[J];
  int ranks = 0, rows = 0;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const int unit = entry[j] >> t.shift;
    owner[j] = miss[j] && load_relaxed(a.s.claims + unit) == key[j];
    takes[j] = owner[j] && (word[j] & kGroupMask) == t.groups;
    members[j] = 0;
    if (owner[j]) {
      members[j] = 1;
      if (WIDE) {
        const int leading = (int)(load_relaxed(a.s.leading + unit) & 15);
        unsigned there = 0;
        if (!takes[j])
          for (int m = 0; m < unit_size; ++m)
            if (t.state[((int64_t)(word[j] & kGroupMask) << t.shift) + m] != kAbsent) there |= 1u << m;
        members[j] = ((1u << leading) - 1) & ~there;
      }
    }
    const unsigned taking = __ballot_sync(~0u, takes[j]);
    local_rank[j] = ranks + __popc(taking & lanes_below());
    ranks += __popc(taking);
    const int mine = __popc(members[j]), upto = warp_scan(mine);
    local_place[j] = rows + upto - mine;
    rows += __shfl_sync(~0u, upto, 31);
    if (WIDE) reader[j] = owner[j];
  }
  if (lane == 0 && missing) store_relaxed(a.s.chunk_counts + chunk, call << 32 | (u64)ranks << 16 | (unsigned)rows);
  if (ROWS && WIDE && missing) ask_rows(0);

  // Chunks lie across the blocks: warp w adds up chunks w * gridDim.x, ...; those before this block's apart.
  {
    int sum = 0, before = 0, sum_rows = 0, before_rows = 0;
    u64 first[kMostBlocks / 32];
#pragma unroll
    for (int i = 0; i < kMostBlocks / 32; ++i)
      first[i] = load_relaxed(a.s.chunk_counts + warp * gridDim.x + min(lane + 32 * i, gridDim.x - 1));
#pragma unroll
    for (int i = 0; i < kMostBlocks / 32; ++i) {
      const int b = lane + 32 * i;
      if (b >= gridDim.x) continue;
      const u64* count = a.s.chunk_counts + warp * gridDim.x + b;
      u64 v = first[i];
      while (v >> 32 != (call & 0xffffffffu)) v = load_relaxed(count);
      const int r = (int)(v >> 16 & 0xffff), f = (int)(v & 0xffff);
      sum += r;
      sum_rows += f;
      if (b < blockIdx.x) {
        before += r;
        before_rows += f;
      }
    }
    sum = __reduce_add_sync(~0u, sum);
    before = __reduce_add_sync(~0u, before);
    sum_rows = __reduce_add_sync(~0u, sum_rows);
    before_rows = __reduce_add_sync(~0u, before_rows);
    if (lane == 0) {
      full[warp] = sum;
      part[warp] = before;
      full_rows[warp] = sum_rows;
      part_rows[warp] = before_rows;
    }
  }
  __syncthreads();
  int needed = 0;  // by all blocks
  {
    const int sum = lane < warps ? full[lane] : 0, sum_rows = lane < warps ? full_rows[lane] : 0;
    const int upto = warp_scan(sum), upto_rows = warp_scan(sum_rows);
    needed = __shfl_sync(~0u, upto, 31);
    if (lane == warp) {
      first_rank[warp] = upto - sum + part[warp];
      first_place[warp] = upto_rows - sum_rows + part_rows[warp];
    }
    if (!ROWS && threadIdx.x == 31) *a.fetch_count = upto_rows;
  }
  // Victims of all of this block's warps, found in one pass over the queue: warp w's ranks are
  // first_rank[w] .. + held_ranks[w], and those intervals rise with w.
  __shared__ int held_ranks[32];
  if (lane == 0) held_ranks[warp] = ranks;
  __syncthreads();
  int last = 0;
  for (int w = warps - 1; w >= 0 && last == 0; --w)
    if (held_ranks[w]) last = first_rank[w] + held_ranks[w];
  int seen = 0;
  for (int start = 0; seen < last && start < t.groups; start += blockDim.x * kPerThread) {
    int group[kPerThread];
    const unsigned bits =
        replaceable(t, queue, start + threadIdx.x * kPerThread, step, a.in_flight, (int)call, group);
    int total;
    int rank = seen + block_scan(__popc(bits), parts, total);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (!(bits >> i & 1)) continue;
      int low = 0, high = warps - 1;  // the last warp that begins at or before this rank
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_rank[middle] <= rank) low = middle; else high = middle - 1;
      }
      // Warps without a claim share their beginning with the next one, which the search has skipped to.
      const int offset = rank - first_rank[low];
      if (offset >= 0 && offset < held_ranks[low]) victims[low * 32 * J + offset] = group[i];
      ++rank;
    }
    seen += total;
  }
  __syncthreads();
  if (seen < last) {
    if (threadIdx.x == 0) report(a.s, kTooFew, needed, seen, step);
    if (ROWS && missing) rows_coming.wait();  // a block must not leave under its copies
    return;
  }
  int replaced = 0;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    if (!owner[j]) continue;
    const int unit = entry[j] >> t.shift;
    if (takes[j]) {
      const int group = victims[warp * 32 * J + local_rank[j]];
      store_relaxed(t.held + group, held_in(step) | (unsigned)call);
      const int old = t.group_tag[group];
      if (old < t.units) {
        store_relaxed(t.unit_group + old, t.groups);
        ++replaced;
      }
      t.group_tag[group] = unit;
      t.last_used[group] = step;
      word[j] = group;
    }
    if (ROWS) word[j] |= members[j] << kGroupBits;
    store_relaxed(t.unit_group + unit, word[j]);
    if (!ROWS) {
      const int group = word[j] & kGroupMask;
      int at = first_place[warp] + local_place[j];
      for (unsigned m = members[j]; m; m &= m - 1, ++at) {
        a.fetch_entries[at] = (unit << t.shift) + __ffs(m) - 1;
        a.fetch_slots[at] = (group << t.shift) + __ffs(m) - 1;
      }
    }
  }
  if (!ROWS) __threadfence();  // `held` before PENDING, at both of which other blocks may still look
#pragma unroll
  for (int j = 0; j < J; ++j) {
    if (!owner[j]) continue;
    const int group = word[j] & kGroupMask;
    for (int m = 0; m < unit_size; ++m) {
      const int64_t slot = ((int64_t)group << t.shift) + m;
      if (members[j] >> m & 1)
        t.state[slot] = ROWS ? kValid : kPending;
      else if (takes[j])
        t.state[slot] = kAbsent;
    }
  }
  replaced = __reduce_add_sync(~0u, replaced);
  if (lane == 0) {
    u64* counts = reinterpret_cast<u64*>(a.counts);
    if (replaced) atomicAdd(counts + kReplaced, (u64)replaced);
    if (rows) atomicAdd(counts + kFetched, (u64)rows);
  }

  // Whoever is not the owner waits until that has named the group.
#pragma unroll
  for (int j = 0; j < J; ++j) {
    if (!miss[j]) continue;
    while ((word[j] & kGroupMask) == t.groups) {
      word[j] = load_relaxed(t.unit_group + (entry[j] >> t.shift));
      if (load_relaxed(a.s.failed)) break;
    }
    a.slots[place[j]] = ((word[j] & kGroupMask) << t.shift) + (entry[j] & (unit_size - 1));
  }
  if constexpr (!ROWS) return;
  if (!missing) return;
  __syncwarp();

  // 4. Bytes to their slots, a row at a time by the whole warp.
  for (int from = 0, all = 1; from < all; from += a.buffered_rows) {
    if (from) {
      rows_coming.again();
      ask_rows(from);
    }
    rows_coming.wait();
    all = 0;
#pragma unroll
    for (int j = 0; j < J; ++j)
      for (unsigned left = __ballot_sync(~0u, reader[j]); left; left &= left - 1) {
        const int source = __ffs(left) - 1;
        const int row_entry = __shfl_sync(~0u, entry[j], source);
        const int group = __shfl_sync(~0u, word[j], source) & kGroupMask;
        unsigned m = WIDE ? __shfl_sync(~0u, members[j], source) : 1;
        for (; m; m &= m - 1, ++all) {
          // After a fault there may be no group.
          if (all < from || all >= from + a.buffered_rows || group == t.groups) continue;
          const int member = WIDE ? __ffs(m) - 1 : 0;
          rows_coming.put(WIDE ? (row_entry & -unit_size) + member : row_entry, all - from,
                          (group << t.shift) + member);
        }
      }
  }
}

}  // namespace tier

#include "resolve_few.cuh"

namespace tier {

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
}

// Calls `f` with both flags as compile-time constants.
template <typename F>
cudaError_t choose(bool rows, bool wide, F f) {
  if (rows) return wide ? f(std::true_type(), std::true_type()) : f(std::true_type(), std::false_type());
  return wide ? f(std::false_type(), std::true_type()) : f(std::false_type(), std::false_type());
}

template <bool ROWS, bool WIDE>
cudaError_t launch_few(const Resolve& a, int blocks, int threads, int shared, cudaStream_t stream) {
  if (a.selections <= threads)
    resolve_few_kernel<1, ROWS, WIDE><<<blocks, threads, shared, stream>>>(a);
  else
    resolve_few_kernel<2, ROWS, WIDE><<<blocks, threads, shared, stream>>>(a);
  return cudaGetLastError();
}

template <int J, bool ROWS, bool WIDE>
cudaError_t launch(const Resolve& a, int blocks, int threads, int shared, cudaStream_t stream) {
  auto kernel = resolve_kernel<J, ROWS, WIDE>;
  // Not a cooperative launch, which costs 0.2 us more: what else runs on the device meanwhile (a fetch, another
  // stream's kernels) ends by itself, and then every block gets its place.
  kernel<<<blocks, threads, shared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace tier

// The caller sees to it that `blocks` fit on the device at once. items: selections per lane; 0: the kernel for few.
extern "C" int tier_resolve(
    const tier::Resolve* a, int items, int rows, int blocks, int threads, int shared, void* stream) {
  using namespace tier;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return choose(rows, a->t.shift > 0, [&](auto with_rows, auto wide) {
    constexpr bool R = decltype(with_rows)::value, W = decltype(wide)::value;
    if (items == 0) return launch_few<R, W>(*a, blocks, threads, shared, s);
    return items == 1 ? launch<1, R, W>(*a, blocks, threads, shared, s)
                      : launch<4, R, W>(*a, blocks, threads, shared, s);
  });
}

// Loads the kernels now, so that neither a first request nor a graph's capture does.
extern "C" int tier_prepare() {
  using namespace tier;
  for (int rows = 0; rows < 2; ++rows)
    for (int wide = 0; wide < 2; ++wide) {
      const cudaError_t error = choose(rows, wide, [&](auto with_rows, auto w) {
        constexpr bool R = decltype(with_rows)::value, W = decltype(w)::value;
        cudaError_t e = allow_shared(resolve_kernel<1, R, W>);
        if (e == cudaSuccess) e = allow_shared(resolve_kernel<4, R, W>);
        if (e == cudaSuccess) e = allow_shared(resolve_few_kernel<1, R, W>);
        if (e == cudaSuccess) e = allow_shared(resolve_few_kernel<2, R, W>);
        return e;
      });
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}
