#!/bin/sh
# The browser that tests/e2e/test_dashboard.py drives: Debian's chromium, installed where this runs as root and it is absent. Where
# it cannot be helped, this says how and succeeds: that test is then skipped, and says so.
set -u

command -v chromium >/dev/null 2>&1 && exit 0
command -v google-chrome >/dev/null 2>&1 && exit 0

give_up() {
    echo "no browser for the test of the dashboard: $1" >&2
    exit 0
}

command -v apt-get >/dev/null || give_up "install chromium, or name one in BATON_TEST_BROWSER"
[ "$(id -u)" = 0 ] || give_up "install it with: sudo apt-get install chromium"
log=$(mktemp) || exit 0
trap 'rm -f "$log"' EXIT
install() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install chromium >"$log" 2>&1; }
install && exit 0
apt-get -qq update >"$log" 2>&1 # the package lists are missing or old
install || give_up "apt-get cannot install chromium: $(tail -n 1 "$log")"
