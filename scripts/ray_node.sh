#!/usr/bin/env bash
# One node of a Ray cluster, in the foreground, until Ctrl-C or SIGTERM.
#
#   bash scripts/ray_node.sh head   [--address IP] [--port 6379] [arguments of `ray start`]
#   bash scripts/ray_node.sh worker --head HOST:6379 [--address IP] [arguments of `ray start`]
#
# --address is this node's own, needed where it has several network cards; not 127.0.0.1, which no other node
# reaches. A worker waits for its head, and joins again when it was cut off: with trainer.max_restarts the run then
# goes on by itself. For `ray job submit` start the head with --include-dashboard=true. The run itself is started
# on one of the nodes, as always, with RAY_ADDRESS=HOST:6379 set.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$REPO_ROOT"
setup_environment train
exec "$PYTHON" -m verl.single_controller.ray.node "$@"
