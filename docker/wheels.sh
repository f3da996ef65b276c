#!/usr/bin/env bash
# Fills .docker/wheels with everything the image installs: Warmpath itself and its locked, hash-checked dependencies.
#
# The Dockerfile installs from that folder alone when it is there, so an image build needs no package index; without
# it the build runs this same script inside.
#
#   PYTHON=python3.11 docker/wheels.sh    the interpreter whose pip downloads; it must match the image's version
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d "${TMPDIR:-/tmp}/warmpath-wheels.XXXXXX")
wheels=$work/wheels
wanted=$work/requirements.txt
trap 'rm -rf "$work"' EXIT

# Debian's own Python has no pip outside a virtual environment, and a pip before 26.1 takes no hashes from constraints:
# so the pip of the lock does the work.
"$python" -m venv "$work/venv"
python=$work/venv/bin/python
awk '/^[^ #]/ {wanted = /^pip==/} wanted' requirements.lock >"$work/pip.txt"
"$python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement "$work/pip.txt"

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .

own=$(realpath "$wheels"/warmpath-*.whl)
digest=$(sha256sum "$own" | cut -d ' ' -f 1)
{
  cat docker/requirements.txt
  printf 'warmpath @ file://%s --hash=sha256:%s\n' "$own" "$digest"
} >"$wanted"
# The lock serves as constraints: pip resolves what these need, and takes versions and hashes from it.
"$python" -m pip download --quiet --dest "$wheels" --only-binary=:all: --require-hashes \
  --constraint requirements.lock --requirement "$wanted"

# In place only when complete: a build takes the folder for all that it needs.
mkdir -p .docker
rm -rf .docker/wheels
mv "$wheels" .docker/wheels
