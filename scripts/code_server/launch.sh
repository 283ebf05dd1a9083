#!/usr/bin/env bash
# Starts a code server on this node: bash scripts/code_server/launch.sh [--port 1234] [--workers 16] [...]
# All arguments go to `python -m verl.code_server`; by default it answers only this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m verl.code_server "$@"
