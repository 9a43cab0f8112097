#!/bin/sh
# Everything for one GPU, from a bare checkout: build, kernel tests, benchmark.
#
#     benchmarks/gpu/run.sh [options of bench.py]
#
# Needs Python with torch, triton and numpy, and g++; installs nothing. Variables:
#   PYTHON     the interpreter, by default python3
#   NANOBIND   the folder of nanobind's package, by default the installed one
#   CARRIED    a folder of pure Python packages (pytest and what it needs), if they are not installed
#   TESTS      which tests to run, by default tests/kernels/test_triton_*.py; "none" for none
#   BENCH      "none" for no benchmark
# A failed build or test does not stop what comes after it; the exit code tells.
set -u
cd "$(dirname "$0")/../.."
root=$PWD
made=$root/build/gpu
PYTHON=${PYTHON:-python3}
status=0

# The package without its public face: that imports every stage, and asks for installed metadata.
mkdir -p "$made/weightwire"
cat > "$made/weightwire/__init__.py" <<EOF
__path__ = [$("$PYTHON" -c 'import sys; print(repr(sys.argv[1]))' "$root/src/weightwire"), *__path__]
EOF

setting() { "$PYTHON" -c "import sysconfig; print(sysconfig.$1)"; }

native=$made/weightwire/_native$(setting "get_config_var('EXT_SUFFIX')")

# The flags CMake gives them in a release build.
build_native() {
  [ -e "$native" ] && [ -z "$(find native -newer "$native")" ] && return 0
  nanobind=${NANOBIND:-$("$PYTHON" -c 'import nanobind; print(nanobind.__path__[0])')} || return 1
  flags="-O3 -DNDEBUG -std=c++17 -fPIC -fvisibility=hidden -fno-stack-protector"
  flags="$flags -ffunction-sections -fdata-sections"
  include=$(setting "get_paths()['include']")
  ${CXX:-g++} $flags -fno-strict-aliasing -DNB_BUILD -DNB_COMPACT_ASSERTIONS -I"$include" \
    -I"$nanobind/include" -isystem "$nanobind/ext/robin_map/include" \
    -c "$nanobind/src/nb_combined.cpp" -o "$made/nanobind.o" &
  library=$!
  ${CXX:-g++} $flags -D_native_EXPORTS -I"$include" -I"$nanobind/include" \
    -c native/module.cpp -o "$made/module.o"
  compiled=$?
  wait "$library" && [ "$compiled" -eq 0 ] || return 1
  ${CXX:-g++} -shared -Wl,-s -Wl,--gc-sections "$made/module.o" "$made/nanobind.o" -pthread \
    -o "$native"
}

began=$(date +%s)
if build_native; then
  echo "native kernels: ready after $(($(date +%s) - began)) s"
else
  echo "native kernels: NOT built; the reference stands in, on smaller pieces"
  export WEIGHTWIRE_BACKEND=reference
  status=1
fi

PYTHONPATH=$made${CARRIED:+:$CARRIED}${PYTHONPATH:+:$PYTHONPATH}
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
"$PYTHON" benchmarks/gpu/imports.py || status=1

TESTS=${TESTS:-tests/kernels/test_triton_*.py}
if [ "$TESTS" != none ]; then
  if "$PYTHON" -c 'import pytest'; then
    # Neither the environment's plugins nor its packages' warnings are the kernels' failures.
    # shellcheck disable=SC2086
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$PYTHON" -m pytest -q -p no:cacheprovider --durations 5 \
      -W default --maxfail 20 --tb short $TESTS || status=1
  else
    echo "kernel tests: NOT run, no pytest; name a folder that holds it with CARRIED"
    status=1
  fi
fi

if [ "${BENCH:-}" != none ]; then
  "$PYTHON" benchmarks/gpu/bench.py "$@" || status=1
fi
exit $status
