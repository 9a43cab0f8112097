#!/bin/sh
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, in a folder of their own, and
# runs attacks and fuzz tests on them: any report of a sanitizer ends the run with an error.
set -eu
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
python=${PYTHON:-python3}

if [ ! -x "$work/venv/bin/python" ]; then
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet "scikit-build-core>=0.11" "nanobind>=2.4" ninja cmake \
        numpy ml_dtypes typer rich pytest hypothesis
fi
"$work/venv/bin/pip" install --quiet --no-build-isolation --no-deps --force-reinstall . \
    -C cmake.define.WEIGHTWIRE_SANITIZE=ON -C cmake.build-type=RelWithDebInfo -C build-dir="$work/build"

export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# Python frees little at exit, and hostile sizes must fail as they do without a sanitizer.
export ASAN_OPTIONS=detect_leaks=0,allocator_may_return_null=1,abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1,halt_on_error=1,abort_on_error=1
export WEIGHTWIRE_SANITIZED=1
copy=$(mktemp -d)
cp -r attacks tests pyproject.toml "$copy"
cd "$copy"
"$work/venv/bin/python" attacks/run.py
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider tests/fuzz tests/kernels/test_parity.py tests/apply tests/test_digest.py
rm -r "$copy"
echo "no report of a sanitizer"
