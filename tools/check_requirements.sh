#!/bin/sh
# Checks what `make` cannot install, and prints the Python interpreter to use: the one given as first
# argument, or the first suitable one of python3.13, 3.12, 3.11 and python3. If something is missing,
# prints one sentence that says what, and exits with status 1.
#
# Each candidate is run, because the shim of a version manager may exist and still not work.
set -u

fail() {
  echo "graft: $1" >&2
  exit 1
}

check_python() {
  "$1" -c '
import os, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("it is Python " + version)
try:
    import ensurepip, venv
except ImportError:
    sys.exit("its venv module is missing (Debian and Ubuntu: apt install python%s-venv)" % version)
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("its C headers are missing (Debian and Ubuntu: apt install python%s-dev)" % version)
print(sys.executable)
' 2>&1
}

check_compiler() {
  # The candidate is not quoted, because CXX may contain options.
  printf '#include <optional>\nint main() { if constexpr (sizeof(int) > 1) return 0; }\n' |
    $1 -std=c++17 -x c++ - -o /dev/null 2>&1
}

# first CHECK CANDIDATE...: prints the output of CHECK for the first candidate for which it succeeds,
# or else why each candidate is unsuitable.
first() {
  check=$1
  shift
  reasons=
  for candidate; do
    if ! command -v "${candidate%% *}" >/dev/null; then
      reason="not found"
    elif output=$("$check" "$candidate"); then
      printf '%s\n' "$output"
      return 0
    else
      reason=$(printf '%s\n' "$output" | head -n 1)
    fi
    reasons="${reasons:+$reasons; }$candidate: $reason"
  done
  printf '%s\n' "$reasons"
  return 1
}

[ "$(uname)" = Linux ] || fail "graft runs on Linux; this is $(uname)"
[ -w . ] || fail "make must be able to write to $PWD"
for tool in git flock; do
  command -v "$tool" >/dev/null || fail "graft needs $tool and found none"
done
if [ -n "${CXX:-}" ]; then set -- "${1:-}" "$CXX"; else set -- "${1:-}" c++ g++ clang++; fi
named=$1
shift
found=$(first check_compiler "$@") ||
  fail "graft needs a C++17 compiler and found none ($found). Debian and Ubuntu: apt install g++"
found=$(first check_python ${named:-python3.13 python3.12 python3.11 python3}) ||
  fail "graft needs Python 3.11 or newer with its venv module and its C headers, and found none \
($found). Install one, or name one: make PYTHON=/path/to/python3"
printf '%s\n' "$found"
