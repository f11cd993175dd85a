// What a launch of the page kernels is told. Read by nvcc, by NVRTC and by C++ alike, so nothing is included here.
#pragma once

namespace kvtier::cuda {

using U32 = unsigned int;
using U64 = unsigned long long;

inline constexpr U32 kLaneBytes = 16;  // one load or store of a thread, and one lane of the checksum
inline constexpr U32 kThreads = 512;   // of a block
inline constexpr U32 kWarp = 32;
inline constexpr U32 kWarps = kThreads / kWarp;
inline constexpr U32 kLoads = 4;  // that a thread has under way before it stores the first of them
inline constexpr U32 kTileLanes = kThreads * kLoads;
inline constexpr U32 kLaunchPages = 64;

// A segment of the pool; the bytes of a page from `first` on lie in it.
struct SegmentEntry {
  U64 base, stride, first;
};

// One page of a launch: its slot in the pool, where it lies as a page, and the keys of its checksum.
struct PageEntry {
  U64 page, k1, k2;
  U32 slot, unused;
};

struct LaneSum {
  U64 a, b;
};

// Travels by value as the kernel's parameter, so that no array of it can be written over while a launch is queued.
//
// The work is cut into tiles of kTileLanes lanes, page after page, and block b of n gets the tiles from all * b / n on.
// What it adds up of page p goes to sums[(p + b) * kWarps ..], one entry for each warp: p + b is another number for
// every pair that meets.
struct PageLaunch {
  const SegmentEntry* segments;  // [segment_count + 1]; the last one's `first` is the payload
  LaneSum* sums;                 // [pages + blocks][kWarps], or null: no checksum
  U64 begin, end;                // the bytes of every page that are copied: a range of layers, or all
  U64 payload;
  U64 padded;         // gather writes zeros from `payload` to here; 0: to nowhere
  U32 segment_lanes;  // of every segment, where all are alike; else 0
  U32 segment_count;
  U32 pages;
  U32 unused;
  PageEntry page[kLaunchPages];
};

}  // namespace kvtier::cuda
