// A fuzz target takes any bytes. It reads them as a program that spoils something valid, hands the result to the code
// under test, and proves that whatever is accepted is consistent: not crashing is not enough. Checksums that guard a
// parser are made right again where the input says so, or nothing spoiled would ever come past them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace kvtier::fuzz {

using Input = std::vector<std::uint8_t>;

// An input as numbers; past its end all are 0.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> input) : left_(input) {}
  bool done() const { return left_.empty(); }
  bool flag() { return (byte() & 1) != 0; }
  std::uint8_t byte() { return static_cast<std::uint8_t>(take(1)); }
  std::uint16_t half() { return static_cast<std::uint16_t>(take(2)); }
  std::uint64_t number() { return take(8); }
  std::size_t below(std::size_t n) { return n == 0 ? 0 : half() % n; }

 private:
  std::uint64_t take(std::size_t bytes) {
    std::uint64_t value = 0;
    const std::size_t count = std::min(bytes, left_.size());
    if (count != 0) std::memcpy(&value, left_.data(), count);
    left_ = left_.subspan(count);
    return value;
  }

  std::span<const std::uint8_t> left_;
};

// Spoils `bytes` as up to 15 steps of the input say: bits, bytes, whole numbers, pieces from elsewhere, a cut.
inline void spoil(Reader& in, std::vector<std::byte>& bytes) {
  for (int steps = in.byte() % 16; steps > 0 && !bytes.empty(); --steps) {
    const std::uint8_t kind = in.byte();
    const std::size_t at = in.below(bytes.size()), room = bytes.size() - at;
    switch (kind % 6) {
      case 0:
        bytes[at] ^= static_cast<std::byte>(1u << (kind / 6 % 8));
        break;
      case 1:
        bytes[at] = static_cast<std::byte>(in.byte());
        break;
      case 2: {
        const std::uint64_t value = in.number();
        std::memcpy(bytes.data() + at, &value, std::min<std::size_t>(room, 8));
        break;
      }
      case 3: {
        const std::size_t from = in.below(bytes.size());
        std::memmove(bytes.data() + at, bytes.data() + from, std::min({room, bytes.size() - from, in.below(1024)}));
        break;
      }
      case 4:
        std::memset(bytes.data() + at, kind < 128 ? 0 : 0xFF, std::min<std::size_t>(room, in.byte()));
        break;
      default:
        if (kind >= 192) bytes.resize(at);
    }
  }
}

struct Target {
  const char* name;
  void (*run)(Reader& in);
  std::vector<Input> (*seeds)();
};
const std::vector<Target>& targets();  // driver.cpp

// What must hold of anything accepted; ends the process with the text, and the driver keeps the input.
[[noreturn]] void broken(const std::string& what);
inline void require(bool holds, const std::string& what) {
  if (!holds) broken(what);
}

// -- the targets
void fuzz_record(Reader& in);
std::vector<Input> record_seeds();
void fuzz_journal(Reader& in);
std::vector<Input> journal_seeds();
void fuzz_store(Reader& in);
std::vector<Input> store_seeds();
void fuzz_identities(Reader& in);
std::vector<Input> identity_seeds();
void fuzz_page(Reader& in);
std::vector<Input> page_seeds();

}  // namespace kvtier::fuzz
