#!/bin/sh
# Prints the lines for .env by which the stack's base images are those that the registry has now, whatever becomes of
# their tags: NAME:TAG@sha256:DIGEST. `sh deploy/pin.sh >> .env`; run it again, and replace the lines, to take updates.
# DOCKER names the engine's command, such as podman.
set -eu
docker=${DOCKER:-docker}
cd "$(dirname "$0")/.."
grep -ho '\${EMBQ_[A-Z]*_IMAGE:-[^}]*}' docker-compose.yml | sort -u | tr -d '${}' | while IFS= read -r pair; do
  variable=${pair%%:-*} image=${pair#*:-}
  "$docker" pull --quiet "$image" >&2 </dev/null
  digest=$("$docker" image inspect --format '{{index .RepoDigests 0}}' "$image" </dev/null)
  case $digest in
    *@sha256:*) echo "$variable=$image@${digest##*@}" ;;
    *) echo "$image has no digest: it was made here, and came from no registry" >&2; exit 1 ;;
  esac
done
