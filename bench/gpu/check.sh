#!/usr/bin/env bash
# Proves the GPU data plane where there is a card, in under nine minutes and without a network: builds, runs the gpu
# tests, compute-sanitizer on the small ones, then the benches, each beside its limit in the same run.
#
#   bench/gpu/check.sh [--dry-run] [--python PYTHON]
#
# JSON, plots and a summary go to $OUT (default ./out). Needs a C++ compiler; nvcc, or CuPy with NVRTC; Python 3.11 or
# later with numpy, torch, nanobind, ninja and pytest (CMake is used where it is there). `serve` and `plots` need the
# wheels of requirements/gpu.txt too, in $WHEELS (default ./wheels). A step that lacks something is skipped and says so;
# one that hangs is ended at its own limit and costs no other step its time.
# --dry-run: the same steps, small, over an emulated device. PYTHON: the interpreter (default: python3).
set -uo pipefail
cd "$(dirname "$0")/../.."

dry="" python="${PYTHON:-python3}" OUT="${OUT:-$PWD/out}"
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=--dry-run ;;
    --python) shift; python="$1" ;;
    *) sed -n '2,12p' "$0" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$OUT"
export OUT PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
total=530 began=$SECONDS failed=0 patience=1
[ -n "$dry" ] && patience=4 total=1800  # a rehearsal may be on a small and busy machine
export SERVE_SECONDS=$((110 * patience))
: >"$OUT/steps.txt"

# step NAME SECONDS COMMAND...: runs it for at most so long, and never past the end of the whole.
step() {
  local name="$1" limit=$(($2 * patience)) left=$((total - (SECONDS - began))) from=$SECONDS rc
  shift 2
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    printf '%-12s no time left\n' "$name" | tee -a "$OUT/steps.txt"
    failed=1
    return 1
  fi
  printf '== %s (at most %s s)\n' "$name" "$limit"
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  rc=$?
  tail -n 25 "$OUT/$name.log"
  case $rc in
    0) printf '%-12s ok       %3d s\n' "$name" $((SECONDS - from)) ;;
    77) printf '%-12s skipped  %3d s: %s\n' "$name" $((SECONDS - from)) "$(tail -n 1 "$OUT/$name.log")" ;;
    124 | 137) printf '%-12s TOO LONG %3d s\n' "$name" $((SECONDS - from)); failed=1 ;;
    *) printf '%-12s FAILED   %3d s (exit code %d)\n' "$name" $((SECONDS - from)) "$rc"; failed=1 ;;
  esac | tee -a "$OUT/steps.txt"
  [ $rc -eq 0 ] || { [ $rc -eq 77 ] || failed=1; return $rc; }
}

WHEELS="${WHEELS:-wheels}"
if [ -d "$WHEELS" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$PWD/build/gpu-site" \
    "$WHEELS"/*.whl && export PYTHONPATH="$PYTHONPATH:$PWD/build/gpu-site"
fi

build() {
  if ! command -v cmake >/dev/null; then
    "$python" bench/gpu/build.py
    return
  fi
  cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" --log-level=WARNING &&
    cmake --build build/gpu
}
export -f build; export python
if [ -n "$dry" ] && "$python" -c 'from kvtier import _core' 2>/dev/null; then
  echo "== build (there already)"
else
  step build 150 bash -c build || { cat "$OUT/steps.txt"; exit 1; }
fi

sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)"
# The tests on a card, without the conftest.py above: it needs hypothesis, and these tests need nothing of it. Where all
# of them are skipped, the step is.
gpu_tests() {
  local said rc
  said="$("$python" -m pytest -q -rs -p no:cacheprovider --confcutdir=tests/gpu -W ignore::pytest.PytestConfigWarning \
    tests/gpu 2>&1)"
  rc=$?
  printf '%s\n' "$said"
  if [ $rc -eq 0 ] && ! tail -n 1 <<<"$said" | grep -q passed; then
    grep -m 1 '^SKIPPED' <<<"$said" | sed 's/^SKIPPED [^ ]* [^ ]* //'
    return 77
  fi
  return $rc
}
export -f gpu_tests
step tests 90 bash -c gpu_tests
for tool in memcheck racecheck; do
  if [ -n "$dry" ] || [ -z "$sanitizer" ]; then
    step "$tool" 45 "$python" bench/gpu/small.py $dry
  else
    step "$tool" 45 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" bench/gpu/small.py
  fi
done
step link 90 "$python" bench/gpu/link.py $dry
step ends 20 "$python" bench/gpu/ends.py $dry
step beside 60 "$python" bench/gpu/beside.py $dry
step disk 40 "$python" bench/gpu/disk.py $dry
step serve 140 "$python" bench/gpu/serve.py $dry
step plots 30 "$python" bench/gpu/plots.py

echo "== summary, $((SECONDS - began)) s"
cat "$OUT/steps.txt"
exit $failed
