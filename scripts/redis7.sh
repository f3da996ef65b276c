#!/bin/sh
# Unpacks Debian's redis-server into .redis7, for the tests that need a Redis 7 or one with TLS. Nothing is installed and
# nothing starts by itself; a second run finds it there and asks nobody. `redis-tools` brings the server along, as the
# program `redis-check-rdb`; the server's own package only has the links and the service.
set -eu
cd "$(dirname "$0")/.."
target=.redis7

exec 9>"${TMPDIR:-/tmp}/warmpath-redis7-$(id -u).lock"
flock 9
[ -x "$target/redis-server" ] && exit 0

rm -rf "$target"
scripts/debian.sh "$target/root" redis-tools libjemalloc2 liblzf1 libatomic1
libraries="$(echo "$target"/root/usr/lib/*-linux-gnu)"
ln -s root/usr/bin/redis-check-rdb "$target/redis-server.unchecked"
version="$(LD_LIBRARY_PATH="$libraries" "$target/redis-server.unchecked" --version 2>&1 || :)"
case "$version" in
  *"Redis server v=7."* | *"Redis server v=8."*) mv "$target/redis-server.unchecked" "$target/redis-server" ;;
  *)
    echo "this system's redis-tools bring no Redis 7 along: ${version:-it does not run}" >&2
    exit 1
    ;;
esac
