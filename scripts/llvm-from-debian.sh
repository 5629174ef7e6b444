#!/usr/bin/env bash
# Makes `cargo build --features cuda` possible where the prebuilt LLVM of cubecl cannot be downloaded.
#
#     scripts/llvm-from-debian.sh                     # Debian or Ubuntu with llvm-22-dev in its package lists
#     LLVM_MAJOR=23 scripts/llvm-from-debian.sh       # another LLVM; 22 is the one that was tried
#
# Why: burn's CUDA backend generates PTX with LLVM. The build script of its dependency `tracel-llvm-bundler` downloads a
# prebuilt LLVM 23 from GitHub, unless `<user data folder>/tracel/tracel-llvm-<version>/.tracel-llvm-installed` exists;
# then it asks `bin/llvm-config` in that folder where LLVM is. This script puts such a folder in place that points to
# Debian's LLVM. It does not copy anything. Running it again changes nothing; remove the folder to undo it.

set -euo pipefail

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

llvm_major=${LLVM_MAJOR:-22}
llvm_config=/usr/lib/llvm-$llvm_major/bin/llvm-config
# Polly is part of what `llvm-config --libs` lists; z3, zstd, zlib and libxml2 are what Debian's LLVM was built with.
packages=(g++ "llvm-$llvm_major-dev" "libpolly-$llvm_major-dev" libz3-dev libzstd-dev zlib1g-dev libxml2-dev)

# The folder's name carries the version of the bundler, which changes with burn: read it where cargo does.
lock=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/Cargo.lock
[[ -f $lock ]] || fail "$lock: no such file" "run \`cargo generate-lockfile\` first"
version=$(sed -n '/^name = "tracel-llvm-bundler"$/{n;s/^version = "\(.*\)"$/\1/p}' "$lock")
[[ -n $version ]] || fail "$lock: no package \`tracel-llvm-bundler\`" "burn no longer needs this script, or Cargo.lock is not this project's"

# What the crate `dirs` calls the local data folder on Linux: XDG_DATA_HOME counts only if it is absolute.
data=${XDG_DATA_HOME:-}
[[ $data == /* ]] || data=$HOME/.local/share
folder=$data/tracel/tracel-llvm-$version
marker=$folder/.tracel-llvm-installed
wrapper=$folder/bin/llvm-config

if [[ -e $marker ]] && ! grep -qs llvm-from-debian "$wrapper"; then
    echo "$folder: the prebuilt LLVM is installed already, nothing to do"
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true) == installed ]] || missing+=("$package")
done
if (( ${#missing[@]} )); then
    command -v apt-get >/dev/null || fail "apt-get not found" "this script is for Debian and its derivatives"
    as_root=()
    if (( EUID != 0 )); then
        command -v sudo >/dev/null || fail "packages are missing and you are not root" "as root: apt-get install ${missing[*]}"
        as_root=(sudo)
    fi
    echo "installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        fail "apt-get could not install ${missing[*]}" "\`apt-cache policy llvm-$llvm_major-dev\` tells whether your release has it"
fi
[[ -x $llvm_config ]] || fail "$llvm_config: not there, although llvm-$llvm_major-dev is installed" "set LLVM_MAJOR"

# Debian's llvm-config names libz3 by its absolute path, which the bundler would pass on as a library called `libz3`.
mkdir -p "$folder/bin"
cat >"$wrapper.new" <<EOF
#!/bin/sh
# Written by scripts/llvm-from-debian.sh
out=\$("$llvm_config" "\$@") || exit
printf '%s\n' "\$out" | sed -E 's:/[^ ]*/lib([^ /]+)\.so:-l\1:g'
EOF
chmod +x "$wrapper.new"
mv "$wrapper.new" "$wrapper"

libraries=$("$wrapper" --link-static --system-libs) || fail "$wrapper: does not run" "try \`$llvm_config --version\`"
[[ $libraries != */* ]] || fail "$wrapper: cannot turn \`$libraries\` into -l options" "please report this line"
archive=$("$wrapper" --libdir)/libLLVMNVPTXCodeGen.a
[[ -f $archive ]] || fail "$archive: no such file, so this LLVM cannot write PTX" "install another llvm-*-dev and set LLVM_MAJOR"

touch "$marker"
echo "$folder: points to LLVM $("$wrapper" --version) of Debian; \`cargo build --features cuda\` uses it"
