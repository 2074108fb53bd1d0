#!/bin/sh
# Give mooncake's Transfer Engine the system libraries that it needs, without being root: unpacked from Debian's packages into
# the virtual environment, where baton.kv.mooncake_engine looks for them. Nothing is done where the engine loads already. Where it
# cannot be helped, this says why and succeeds: `mooncake` is then not available, and says so wherever it is asked for.
#   usage: mooncake-libraries.sh VENV
set -u
venv=$1
target=$venv/lib/baton-mooncake
packages="libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1"

why_not() { "$venv/bin/python" -c 'from baton.kv.transfer_contract import available; print(available("mooncake") or "")'; }

give_up() {
    echo "mooncake is not available: $1" >&2
    exit 0
}

[ -z "$(why_not)" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "$(why_not) (and there is no apt-get to help with it)"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work" || exit 1
download() { apt-get -qq "$@" download $packages >download.log 2>&1; }
if ! download; then
    # no package lists yet: fetch them into a place of our own
    mkdir -p state/lists/partial cache/archives/partial
    private="-o Dir::State=$work/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$work/cache"
    apt-get -qq $private update >update.log 2>&1
    download $private || give_up "cannot download $packages: $(tail -n 1 download.log)"
fi
for package in *.deb; do
    dpkg-deb -x "$package" unpacked || give_up "cannot unpack $package"
done
mkdir -p "$target"
find unpacked -name 'lib*.so.*' ! -path '*/rsocket/*' -exec cp -P {} "$target" \;
reason=$(why_not)
[ -z "$reason" ] || give_up "$reason"
