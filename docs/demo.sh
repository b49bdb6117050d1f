#!/bin/sh
# What `make run` shows: the flag off, then on with nothing stored, then on again.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
trap 'exit 130' INT TERM
export VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR="$place/tables" VLLM_FLASHINFER_FLAGS_LOG=console
unset VLLM_FLASHINFER_PERSISTENT_CACHE || true

start() {
    printf '\n=== %s\n\n' "$1"
    shift
    env "$@" fi-flags warmup --ranks "${RANKS:-2}"
}

start 'The flag is off: every rank tunes, and nothing is kept' VLLM_FLASHINFER_PERSISTENT_CACHE=
start 'The flag is on, first start: the ranks tune, agree, and keep one table' \
    VLLM_FLASHINFER_PERSISTENT_CACHE=1
start 'The flag is on, second start: every rank serves the kept table' \
    VLLM_FLASHINFER_PERSISTENT_CACHE=1
