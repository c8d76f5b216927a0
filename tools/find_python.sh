#!/bin/sh
# Prints the path of the Python to build graft with: the one given as first argument, or the first
# of python3.13, 3.12, 3.11 and python3 that runs, is at least 3.11, has the venv module and its C
# headers. If there is none, prints one sentence that names what is missing.
#
# Candidates are run, because the shim of a version manager can exist and not work.
set -u

probe='
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("its venv module is missing (Debian and Ubuntu: apt install python%d.%d-venv)"
             % sys.version_info[:2])
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("its C headers (Python.h) are missing (Debian and Ubuntu: apt install python%d.%d-dev)"
             % sys.version_info[:2])
print(sys.executable)
'

named=${1:-}
reasons=""
for candidate in ${named:-python3.13 python3.12 python3.11 python3}; do
  if ! command -v "$candidate" >/dev/null 2>&1; then
    [ -n "$named" ] && reasons="$candidate does not exist"
    continue
  fi
  if answer=$("$candidate" -c "$probe" 2>&1); then
    printf '%s\n' "$answer"
    exit 0
  fi
  answer=$(printf '%s\n' "$answer" | tail -n 1)
  reasons="${reasons:+$reasons; }$candidate: $answer"
done
echo "graft needs Python 3.11 or newer with its venv module and its C headers, and found none" \
  "(${reasons:-no python3 on the PATH}). Install one, or name one: make PYTHON=/path/to/python3" >&2
exit 1
