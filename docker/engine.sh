#!/usr/bin/env bash
# Makes sure a Docker engine answers, and takes away again only what this script started.
#
#   docker/engine.sh start   use the running engine, else start one of our own
#   docker/engine.sh stop    end the engine that `start` began and delete its images; a no-op otherwise
#
# An engine of our own is started only as root on Debian or Ubuntu, the usual build machine. Its data root is a
# temporary directory, so `stop` leaves neither images nor volumes behind; it also puts IP forwarding and its default
# policy back. The packet-filter chains that dockerd adds stay, empty of effect: others may have added to them.
set -euo pipefail

cd "$(dirname "$0")/.."
state=.docker/engine
wait_s=60

say() { printf 'docker/engine.sh: %s\n' "$*" >&2; }

engine_answers() { docker info >/dev/null 2>&1; }

compose_answers() { docker compose version >/dev/null 2>&1 || docker-compose version >/dev/null 2>&1; }

explain_and_fail() {
  say "$1"
  say "Install Docker Engine with the Compose plug-in (https://docs.docker.com/engine/install/), start it, make sure"
  say "that 'docker info' and 'docker compose version' work for this user, and run the command again."
  exit 1
}

install_missing() {
  local -a missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  compose_answers || missing+=(docker-compose)
  command -v iptables >/dev/null || missing+=(iptables)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  [ ${#missing[@]} -eq 0 ] && return
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

launch() {
  local root
  root=$(mktemp -d "${TMPDIR:-/tmp}/warmpath-docker.XXXXXX")
  mkdir -p "$state"
  echo "$root" >"$state/root"
  ip link show docker0 >/dev/null 2>&1 || touch "$state/made-bridge"
  cat /proc/sys/net/ipv4/ip_forward >"$state/ip_forward"
  iptables -S FORWARD | sed -n 's/^-P FORWARD //p' >"$state/forward-policy"
  say "starting dockerd, data root $root, log $root/dockerd.log"
  setsid dockerd --data-root "$root/data" --exec-root "$root/exec" --pidfile "$root/dockerd.pid" \
    >"$root/dockerd.log" 2>&1 </dev/null &
  echo $! >"$state/pid"
  for _ in $(seq "$wait_s"); do
    engine_answers && return
    ours_runs || break
    sleep 1
  done
  tail -n 20 "$root/dockerd.log" >&2
  stop
  explain_and_fail "dockerd did not answer within $wait_s s; the end of its log is above."
}

# True while the recorded process still is the dockerd that we started: process ids are used again.
ours_runs() {
  [ -f "$state/pid" ] && tr '\0' ' ' 2>/dev/null <"/proc/$(cat "$state/pid")/cmdline" | grep -qF "$(cat "$state/root")"
}

start() {
  if ! engine_answers; then
    [ "$(id -u)" -eq 0 ] || explain_and_fail "no Docker engine answers, and only root can start one."
    command -v apt-get >/dev/null || explain_and_fail "no Docker engine answers, and this is not Debian or Ubuntu."
    install_missing
    # Where an init system runs, installing the package has started the machine's own engine by now.
    engine_answers || launch
  fi
  compose_answers || explain_and_fail "the Docker engine answers, but neither 'docker compose' nor 'docker-compose' does."
}

stop() {
  [ -f "$state/root" ] || return 0
  local root pid
  root=$(cat "$state/root")
  pid=$(cat "$state/pid" 2>/dev/null || true)
  if ours_runs; then
    kill "$pid"
    for _ in $(seq "$wait_s"); do ours_runs || break; sleep 1; done
    if ours_runs; then kill -KILL "$pid"; fi
  fi
  # A dockerd that had to be killed leaves the file systems of its containers mounted under the data root.
  awk -v root="$root/" 'index($2, root) == 1 {print $2}' /proc/mounts | sort -r | xargs -r umount -l
  if [ -f "$state/made-bridge" ]; then ip link delete docker0 2>/dev/null || true; fi
  cat "$state/ip_forward" >/proc/sys/net/ipv4/ip_forward
  iptables -P FORWARD "$(cat "$state/forward-policy")"
  rm -rf "$root" "$state"
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  *) say "usage: docker/engine.sh start|stop"; exit 2 ;;
esac
