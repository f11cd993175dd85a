// Page kernels: gather (segments → page), scatter (page → segments), sum (segments → checksum only).
//
// One source, three compilers: nvcc ahead of time, NVRTC at run time, and C++ with shim.hpp for machines without a GPU.
// The launch is small on purpose (a few blocks, see copier.hpp): a copy is bound by the link, and the other processors
// of the GPU go on computing. A `page` may lie in device memory or in pinned host memory.
//
// The plain kernels move 16 bytes a thread and need every segment, base and stride to be a multiple of that; the
// `_bytes` kernels take anything. The checksum is csrc/copy/checksum.hpp's, its last mix left to the CPU.
#include "cuda/page_args.hpp"

#ifndef KVTIER_UNROLL
#define KVTIER_UNROLL _Pragma("unroll")
#endif

namespace kvtier::cuda {

__device__ __forceinline__ U64 product(U64 x) { return (x & 0xFFFFFFFFull) * (x >> 32); }

__device__ __forceinline__ void absorb(LaneSum& sum, U64 a, U64 b, U64 lane, const PageEntry& page) {
  const U64 p = page.k1 + lane * 0x9E3779B97F4A7C15ull;
  const U64 q = page.k2 + lane * 0xC2B2AE3D27D4EB4Full;
  a += product(b ^ p);
  b += product(a ^ q);
  a += product(b ^ p);
  sum.a += a;
  sum.b += b;
}

// Each warp's share of one page's sum.
__device__ __forceinline__ void keep(const PageLaunch& launch, U32 page, LaneSum sum) {
  if (launch.sums == nullptr) return;
  LaneSum* const out = launch.sums + static_cast<U64>(page + blockIdx.x) * kWarps + threadIdx.x / kWarp;
#ifdef KVTIER_KERNEL_SHIM  // its threads run one after another
  if (threadIdx.x % kWarp == 0) *out = LaneSum{0, 0};
  out->a += sum.a;
  out->b += sum.b;
#else
  KVTIER_UNROLL
  for (U32 step = kWarp / 2; step != 0; step /= 2) {
    sum.a += __shfl_down_sync(0xFFFFFFFFu, sum.a, step);
    sum.b += __shfl_down_sync(0xFFFFFFFFu, sum.b, step);
  }
  if (threadIdx.x % kWarp == 0) *reinterpret_cast<ulonglong2*>(out) = make_ulonglong2(sum.a, sum.b);
#endif
}

// The last segment whose first byte is not behind `at`.
__device__ __forceinline__ U32 segment_of(const PageLaunch& launch, U64 at) {
  U32 low = 0, high = launch.segment_count;
  while (high - low > 1) {
    const U32 middle = (low + high) / 2;
    (launch.segments[middle].first <= at ? low : high) = middle;
  }
  return low;
}

__device__ __forceinline__ unsigned char* address(const SegmentEntry& segment, U32 slot, U64 at) {
  return reinterpret_cast<unsigned char*>(segment.base + slot * segment.stride + (at - segment.first));
}

// Where a page's lane lies in the pool.
__device__ __forceinline__ ulonglong2* pool_lane(const PageLaunch& launch, U32 slot, U32 lane) {
  const U64 at = static_cast<U64>(lane) * kLaneBytes;
  const U32 index = launch.segment_lanes != 0 ? lane / launch.segment_lanes : segment_of(launch, at);
  return reinterpret_cast<ulonglong2*>(address(launch.segments[index], slot, at));
}

__device__ __forceinline__ ulonglong2* page_lane(const PageEntry& page, U32 lane) {
  return reinterpret_cast<ulonglong2*>(page.page) + lane;
}

enum Way { kGatherWay, kScatterWay, kSumWay };

// One tile by 16-byte lanes, `last` past its last lane: all loads of a thread first, then its stores.
template <int way>
__device__ __forceinline__ void copy_lanes(const PageLaunch& launch, const PageEntry& page, U32 first, U32 last,
                                           LaneSum& sum) {
  const U32 whole = static_cast<U32>(launch.end / kLaneBytes);  // what lies behind it is padding
  ulonglong2 held[kLoads];
  KVTIER_UNROLL
  for (U32 i = 0; i < kLoads; ++i) {
    const U32 lane = first + i * kThreads;
    held[i] = make_ulonglong2(0, 0);
    if (lane < whole) held[i] = __ldcs(way == kScatterWay ? page_lane(page, lane) : pool_lane(launch, page.slot, lane));
  }
  KVTIER_UNROLL
  for (U32 i = 0; i < kLoads; ++i) {
    const U32 lane = first + i * kThreads;
    if (lane >= last) continue;
    if (way == kGatherWay) __stcs(page_lane(page, lane), held[i]);
    if (way == kScatterWay) __stcs(pool_lane(launch, page.slot, lane), held[i]);
    if (lane < whole && launch.sums != nullptr) absorb(sum, held[i].x, held[i].y, lane, page);
  }
}

// The same byte by byte, for segments that start, end or step off a lane.
template <int way>
__device__ __forceinline__ void copy_bytes(const PageLaunch& launch, const PageEntry& page, U32 first, U32 last,
                                           LaneSum& sum) {
  for (U32 lane = first; lane < last; lane += kThreads) {
    U64 low = 0, high = 0;
    U64 at = static_cast<U64>(lane) * kLaneBytes;
    U32 index = at < launch.payload ? segment_of(launch, at) : launch.segment_count;
    for (U32 k = 0; k < kLaneBytes; ++k, ++at) {
      while (index < launch.segment_count && at >= launch.segments[index + 1].first) ++index;
      unsigned char* const in_page = reinterpret_cast<unsigned char*>(page.page) + at;
      if (at < launch.begin || at >= launch.end) {
        if (way == kGatherWay && at >= launch.payload && at < launch.padded) *in_page = 0;
        continue;
      }
      unsigned char* const in_pool = address(launch.segments[index], page.slot, at);
      const unsigned char byte = way == kScatterWay ? *in_page : *in_pool;
      if (way == kGatherWay) *in_page = byte;
      if (way == kScatterWay) *in_pool = byte;
      (k < 8 ? low : high) |= static_cast<U64>(byte) << (k % 8 * 8);
    }
    if (static_cast<U64>(lane) * kLaneBytes < launch.end && launch.sums != nullptr) {
      absorb(sum, low, high, lane, page);
    }
  }
}

template <int way, bool bytes>
__device__ __forceinline__ void run(const PageLaunch& launch) {
  const U64 stop = way == kGatherWay && launch.padded > launch.end ? launch.padded : launch.end;
  const U32 first = static_cast<U32>(launch.begin / kLaneBytes);
  const U32 last = static_cast<U32>((stop + kLaneBytes - 1) / kLaneBytes);
  const U32 tiles = (last - first + kTileLanes - 1) / kTileLanes;  // of a page
  const U64 all = static_cast<U64>(tiles) * launch.pages;
  const U32 from = static_cast<U32>(all * blockIdx.x / gridDim.x);
  const U32 to = static_cast<U32>(all * (blockIdx.x + 1) / gridDim.x);
  U32 page = from / tiles;
  LaneSum sum = {0, 0};
  for (U32 tile = from; tile < to; ++tile) {
    if (tile == (page + 1) * tiles) {
      keep(launch, page, sum);
      sum = LaneSum{0, 0};
      ++page;
    }
    const U32 start = first + (tile - page * tiles) * kTileLanes;
    const U32 end = start + kTileLanes < last ? start + kTileLanes : last;
    if (bytes) {
      copy_bytes<way>(launch, launch.page[page], start + threadIdx.x, end, sum);
    } else {
      copy_lanes<way>(launch, launch.page[page], start + threadIdx.x, end, sum);
    }
  }
  if (from < to) keep(launch, page, sum);
}

}  // namespace kvtier::cuda

#define KVTIER_KERNEL(name, way, bytes)                                   \
  extern "C" __global__ void __launch_bounds__(kvtier::cuda::kThreads, 1) \
      name(const __grid_constant__ kvtier::cuda::PageLaunch launch) {     \
    kvtier::cuda::run<kvtier::cuda::way, bytes>(launch);                  \
  }

KVTIER_KERNEL(kvtier_gather, kGatherWay, false)
KVTIER_KERNEL(kvtier_scatter, kScatterWay, false)
KVTIER_KERNEL(kvtier_sum, kSumWay, false)
KVTIER_KERNEL(kvtier_gather_bytes, kGatherWay, true)
KVTIER_KERNEL(kvtier_scatter_bytes, kScatterWay, true)
KVTIER_KERNEL(kvtier_sum_bytes, kSumWay, true)
