#!/usr/bin/env bash
# Sets up .venv from the hashed lock. pip brings uv, uv brings the rest; how long it took is kept for reports.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in ${PYTHON:-python3.11 python3.12 python3.13} none; do
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break
done
[ "$python" != none ] || { echo "install: Clawstream needs Python 3.11, 3.12 or 3.13; ${PYTHON:-none of them} is no such (set PYTHON=...)" >&2; exit 1; }
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "install: the lock is for Linux on x86-64, this is $(uname -sm)" >&2; exit 1; }
case "$(ldconfig -p 2>/dev/null)" in *libnuma.so.1*) ;; *) echo "install: vLLM needs the system library libnuma1 (apt-get install libnuma1)" >&2; exit 1 ;; esac
command -v bwrap >/dev/null || echo "install: rewards of type code need bubblewrap (apt-get install bubblewrap); all else works without it" >&2
started=$(date +%s)
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/uv --version >/dev/null 2>&1 || .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r requirements/uv.lock.txt
.venv/bin/uv pip sync -q --compile-bytecode --require-hashes requirements/all.lock
.venv/bin/uv pip install -q --no-deps --no-build-isolation -e .
echo $(($(date +%s) - started)) > .venv/install-seconds
touch .venv/.installed
