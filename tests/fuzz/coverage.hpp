#pragma once

namespace kvtier::fuzz {

inline constexpr unsigned kPlaces = 1 << 16;
extern unsigned char reached[kPlaces];  // 1: this place of the engine has run since it was cleared

}  // namespace kvtier::fuzz
