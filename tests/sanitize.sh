#!/usr/bin/env bash
# The C++ tests under ASan+UBSan and under TSan, then every fuzz target for some seconds: `make sanitize` calls it.
#
#   tests/sanitize.sh JOBS FUZZ_SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$1 seconds=$2

# Without the GPU's machine code, which no sanitizer sees and which takes longer to compile than the rest.
build() {  # SANITIZERS FUZZ
  local dir=build/sanitize-${1%%,*}
  cmake -S . -B "$dir" -G Ninja -DKVTIER_PYTHON=OFF -DKVTIER_CUDA=OFF -DKVTIER_TESTS=ON -DKVTIER_WERROR=ON \
    -DKVTIER_FUZZ="$2" -DKVTIER_SANITIZE="$1" --log-level=WARNING
  cmake --build "$dir" -j "$jobs"
}

# How a sanitized program can be run here, in `how`: as it is; at fixed addresses, where the kernel draws them from more
# bits than the sanitizer's runtime can map; or without a look for leaks, where a process may not trace itself.
ways=("" "setarch -R" "env ASAN_OPTIONS=detect_leaks=0" "env ASAN_OPTIONS=detect_leaks=0 setarch -R")
can_run() {  # PROGRAM ARGUMENT-THAT-DOES-NOTHING
  local said=""
  for how in "${ways[@]}"; do
    if said=$($how "$@" 2>&1); then
      [ -z "$how" ] || echo "$1: run by '$how': it does not run as it is here"
      return 0
    fi
  done
  echo "$1 skipped: it cannot run here ($(printf '%s' "$said" | grep -m 1 . | head -c 200))"
  return 1
}

for kind in address,undefined thread; do
  build $kind "$([ $kind = thread ] && echo OFF || echo ON)"
done
for kind in address,undefined thread; do
  tests=build/sanitize-${kind%%,*}/kvtier_tests
  if [ ! -x $tests ]; then
    echo "C++ tests skipped: no doctest (Debian: doctest-dev)"
  elif can_run $tests --version; then
    echo "kvtier_tests under $kind"
    $how $tests
  fi
done
fuzz=build/sanitize-address/kvtier_fuzz
if can_run $fuzz --list; then
  for target in $($how $fuzz --list); do
    $how $fuzz --seconds "$seconds" "$target"
  done
fi
