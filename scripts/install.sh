#!/bin/sh
# Installs Stockade from the files of a release, after it has verified them.
#
# usage: install.sh [--prefix DIR] [--public-key KEY|FILE] [FROM]
#
#   --prefix DIR          where to install (default: /usr/local as root, else ~/.local)
#   --public-key KEY      the minisign key of the release's makers, or a cosign key's FILE (*.pub);
#                         without it only the checksums are compared, and this is said
#   FROM                  the directory that holds the release (default: that of this script)
#
# It fetches nothing, changes no file outside DIR, and needs no root.

set -eu

fail() {
    printf 'install: %s\n' "$1" >&2
    exit 1
}

prefix='' key='' from=''
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit 0 ;;
    --prefix) prefix=${2:?--prefix needs a directory} && shift 2 ;;
    --public-key) key=${2:?--public-key needs a key} && shift 2 ;;
    -*) fail "no option $1; see --help" ;;
    *) from=$1 && shift ;;
    esac
done
from=$(cd "${from:-$(dirname "$0")}" && pwd)
if [ -z "$prefix" ]; then
    if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
fi
[ "$(uname -sm)" = 'Linux x86_64' ] || fail "the programs are for Linux on x86_64; this is $(uname -sm)"
[ -f "$from/SHA256SUMS" ] || fail "$from holds no SHA256SUMS: name the directory of the release"

case $key in
'') echo 'install: no --public-key: only the checksums are compared' >&2 ;;
*.pub)
    if [ -f "$from/SHA256SUMS.sig" ]; then
        cosign verify-blob --key "$key" --signature "$from/SHA256SUMS.sig" "$from/SHA256SUMS" >&2 || fail 'the signature is not of this key'
    else
        minisign -V -q -p "$key" -m "$from/SHA256SUMS" >&2 || fail 'the signature is not of this key'
    fi
    ;;
*) minisign -V -q -P "$key" -m "$from/SHA256SUMS" >&2 || fail 'the signature is not of this key' ;;
esac
archive=$(cd "$from" && ls stockade-*-x86_64-linux.tar.gz) || fail "$from holds no tarball of the programs"
[ "$(printf '%s\n' "$archive" | wc -l)" = 1 ] || fail "$from holds more than one release"
# Of this file alone: others of the release need not be there.
line=$(grep "  $archive\$" "$from/SHA256SUMS") || fail "SHA256SUMS does not name $archive"
(cd "$from" && printf '%s\n' "$line" | sha256sum --check --quiet --strict) || fail "$archive is not the file that was released"

mkdir -p "$prefix"
tar --directory "$prefix" --strip-components=1 --no-same-owner -xzf "$from/$archive"
"$prefix/bin/stockade" version
case :$PATH: in
*:"$prefix/bin":*) ;;
*) echo "install: $prefix/bin is not in PATH" >&2 ;;
esac
