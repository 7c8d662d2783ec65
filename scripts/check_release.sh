#!/usr/bin/env bash
# Checks a release tag against the package it names, and prints the package's name.
#   bash scripts/check_release.sh ddp-lite-v0.1.0 [FOLDER]
# The tag must be NAME-vX.Y.Z, packages/NAME (or FOLDER/NAME) must state exactly that version, and its
# changelog must have a dated section for it. Fails with one line that says what is wrong otherwise.
set -euo pipefail
cd "${2:-$(dirname "$0")/../packages}"
fail() { echo "$1" >&2; exit 1; }

[[ ${1:-} =~ ^([a-z][a-z0-9-]*)-v([0-9]+\.[0-9]+\.[0-9]+[^[:space:]]*)$ ]] ||
    fail "a release tag is NAME-vX.Y.Z, but got '${1:-}'"
name=${BASH_REMATCH[1]} version=${BASH_REMATCH[2]}
[[ -f $name/pyproject.toml ]] || fail "no package '$name'; the packages are $(echo *)"
grep -qxF "version = \"$version\"" "$name/pyproject.toml" ||
    fail "tag $1 does not match $name: its pyproject.toml has $(grep '^version = ' "$name/pyproject.toml")"
changelog=$'\n'$(<"$name/CHANGELOG.md")$'\n'
[[ $changelog =~ $'\n'"## $version ("[0-9]{4}-[0-9]{2}-[0-9]{2}")"$'\n' ]] ||
    fail "$name/CHANGELOG.md has no dated section '## $version (YYYY-MM-DD)'"
echo "$name"
