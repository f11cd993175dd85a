// Runs the fuzz targets.
//
//   kvtier_fuzz --list                                what there is
//   kvtier_fuzz [--seconds N] [--seed S] TARGET...    N seconds for each; every run prints its seed
//   kvtier_fuzz --replay TARGET FILE                  one input, as it was kept by a run that failed
//
// Built by a compiler with libFuzzer (KVTIER_LIBFUZZER) this is a libFuzzer binary of one target at a time, which takes
// libFuzzer's own options too. Without one the driver below starts from the same seeds, mutates, and keeps what reaches
// new places of the engine; what fails it keeps as fuzz-TARGET.input in the working directory.
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.hpp"

#ifdef KVTIER_LIBFUZZER
#include "../cpp/temp_dir.hpp"
#else
#include <sanitizer/common_interface_defs.h>

#include "coverage.hpp"
#endif

namespace kvtier::fuzz {

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      {"record", fuzz_record, record_seeds}, {"journal", fuzz_journal, journal_seeds},
      {"store", fuzz_store, store_seeds},    {"identities", fuzz_identities, identity_seeds},
      {"page", fuzz_page, page_seeds},
  };
  return all;
}

namespace {

[[noreturn]] void misused(const std::string& why) {
  std::fprintf(stderr, "kvtier_fuzz: %s; targets:", why.c_str());
  for (const Target& target : targets()) std::fprintf(stderr, " %s", target.name);
  std::fprintf(stderr, "\n");
  std::exit(2);
}

const Target& by_name(const std::string& name) {
  for (const Target& target : targets())
    if (name == target.name) return target;
  misused("there is no target '" + name + "'");
}

[[noreturn]] void list() {
  for (const Target& target : targets()) std::printf("%s\n", target.name);
  std::exit(0);
}

}  // namespace

#ifdef KVTIER_LIBFUZZER

void broken(const std::string& what) {
  std::fprintf(stderr, "broken promise: %s\n", what.c_str());
  std::abort();  // libFuzzer keeps the input
}

const Target* chosen = nullptr;

// Turns this program's options into libFuzzer's, and puts the seeds where libFuzzer looks for a corpus.
void prepare(int* argc, char*** argv) {
  static test::TempDir corpus;
  static std::vector<std::string> made = {(*argv)[0]};
  const std::vector<std::string> given(*argv + 1, *argv + *argc);
  bool replays = false;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string& option = given[i];
    if (option == "--list") list();
    replays = replays || option == "--replay";
    if (option == "--seconds" && i + 1 < given.size()) {
      made.push_back("-max_total_time=" + given[++i]);
    } else if (option == "--seed" && i + 1 < given.size()) {
      made.push_back("-seed=" + given[++i]);
    } else if (option[0] == '-') {
      if (option != "--replay") made.push_back(option);
    } else if (chosen == nullptr) {
      chosen = &by_name(option);
    } else {
      made.push_back(option);
    }
  }
  if (chosen == nullptr) misused("libFuzzer runs one target at a time: name it");
  std::size_t number = 0;
  for (const Input& seed : chosen->seeds()) {
    std::ofstream file(corpus.path() + "/" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
  }
  if (!replays) made.push_back(corpus.path());
  static std::vector<char*> pointers;
  for (std::string& argument : made) pointers.push_back(argument.data());
  *argc = static_cast<int>(pointers.size());
  pointers.push_back(nullptr);
  *argv = pointers.data();
}

}  // namespace kvtier::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  kvtier::fuzz::prepare(argc, argv);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvtier::fuzz::Reader in({data, size});
  kvtier::fuzz::chosen->run(in);
  return 0;
}

#else

namespace {

constexpr std::size_t kMostBytes = 512;  // of an input

struct Running {
  const Target* target = nullptr;
  std::uint64_t seed = 0;
  Input input;
} running;

// Also called when a sanitizer ends the process.
void keep_input() {
  if (running.target == nullptr) return;
  const std::string path = std::string("fuzz-") + running.target->name + ".input";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(running.input.data()), static_cast<std::streamsize>(running.input.size()));
  std::fprintf(stderr, "target %s, seed %llu; the input is in %s: kvtier_fuzz --replay %s %s\n", running.target->name,
               static_cast<unsigned long long>(running.seed), path.c_str(), running.target->name, path.c_str());
  running.target = nullptr;
}

void run(const Target& target, std::uint64_t seed, const Input& input) {
  running = {&target, seed, input};
  Reader in(running.input);
  try {
    target.run(in);
  } catch (const std::exception& error) {
    broken(std::string("an exception that is not part of the interface: ") + error.what());
  }
  running.target = nullptr;
}

// True: the last run reached places that no earlier one did.
bool reached_new_places(std::vector<unsigned char>& seen) {
  bool news = false;
  for (unsigned i = 0; i < kPlaces; i += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, reached + i, 8);
    for (unsigned k = i; eight != 0 && k < i + 8; ++k) {
      news = news || (reached[k] != 0 && seen[k] == 0);
      seen[k] |= reached[k];
      reached[k] = 0;
    }
  }
  return news;
}

Input mutated(const std::vector<Input>& corpus, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  static constexpr std::uint8_t kTelling[] = {0, 1, 2, 4, 7, 8, 16, 32, 64, 127, 128, 255};
  Input input = corpus[below(corpus.size())];
  for (std::size_t steps = 1 + below(4); steps > 0; --steps) {
    const std::size_t at = below(input.size() + 1);
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    const auto value = static_cast<std::uint8_t>(below(2) == 0 ? random() : kTelling[below(std::size(kTelling))]);
    switch (below(6)) {
      case 0:
        input.insert(place, value);
        break;
      case 1:
        if (place != input.end()) input.erase(place, place + static_cast<std::ptrdiff_t>(1 + below(input.size() - at)));
        break;
      case 2: {  // the rest of another one
        const Input& other = corpus[below(corpus.size())];
        const std::size_t from = below(other.size() + 1);
        input.resize(at);
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        break;
      }
      case 3:
        for (std::size_t n = below(16); n > 0; --n) input.push_back(static_cast<std::uint8_t>(random()));
        break;
      default:
        if (place != input.end()) *place = below(3) == 0 ? static_cast<std::uint8_t>(*place ^ 1u << below(8)) : value;
    }
  }
  if (input.size() > kMostBytes) input.resize(kMostBytes);
  return input;
}

void fuzz(const Target& target, double seconds, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Input> corpus;
  std::vector<unsigned char> seen(kPlaces, 0);
  std::uint64_t runs = 0;
  std::printf("%-10s seed %llu\n", target.name, static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  for (const Input& input : target.seeds()) {
    run(target, seed, input);
    ++runs;
    reached_new_places(seen);
    corpus.push_back(input);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    const Input input = mutated(corpus, random);
    run(target, seed, input);
    ++runs;
    if (reached_new_places(seen)) corpus.push_back(input);
  }
  std::printf("%-10s %llu inputs, %zu in the corpus, %td places of the engine\n", target.name,
              static_cast<unsigned long long>(runs), corpus.size(), std::count(seen.begin(), seen.end(), 1));
  std::fflush(stdout);
}

int replay(const Target& target, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) misused(std::string("cannot read ") + path);
  run(target, 0, Input(std::istreambuf_iterator<char>(file), {}));
  std::printf("%s: all promises kept\n", path);
  return 0;
}

}  // namespace

void broken(const std::string& what) {
  std::fprintf(stderr, "broken promise: %s\n", what.c_str());
  keep_input();
  std::_Exit(1);
}

int main(int argc, char** argv) {
  double seconds = 20;
  std::uint64_t seed = std::random_device{}();
  std::vector<const Target*> chosen;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--list") list();
    if (argument == "--replay" && i + 2 < argc) return replay(by_name(argv[i + 1]), argv[i + 2]);
    if (argument == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      chosen.push_back(&by_name(argument));
    }
  }
  if (chosen.empty())
    for (const Target& target : targets()) chosen.push_back(&target);
  __sanitizer_set_death_callback(keep_input);
  for (const Target* target : chosen) fuzz(*target, seconds, seed);
  return 0;
}

}  // namespace kvtier::fuzz

int main(int argc, char** argv) { return kvtier::fuzz::main(argc, argv); }

#endif
