#!/bin/sh
# debian.sh FOLDER PACKAGE...: unpacks packages of this Debian into a folder. Nothing is installed and nothing starts by
# itself.
set -eu
folder="$1"
shift

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
  echo "neither apt-get nor dpkg-deb here: $* comes from Debian's packages" >&2
  exit 1
}
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
fetch() {
  (cd "$work" && apt-get -o APT::Sandbox::User="$(id -un)" download "$@")
}
# A fresh image has no list of packages yet.
fetch "$@" >/dev/null 2>&1 || { apt-get update >/dev/null 2>&1 || :; fetch "$@" >/dev/null; }

mkdir -p "$folder"
for package in "$work"/*.deb; do
  dpkg-deb -x "$package" "$folder"
done
