#!/bin/sh
# Lets a further machine in: a user of the running broker for it, and TLS on an address of this machine, kept in .env.
#   sh deploy/add-machine.sh gpu2 10.0.0.5
# The address is needed the first time. Prints what to do on that machine. COMPOSE names another command of Compose.
set -eu
name=${1:?give the name of the new machine, such as gpu2, and the address of this one that it reaches, such as 10.0.0.5}
compose=${COMPOSE:-docker compose}
cd "$(dirname "$0")/.."
value() { sed -n "s/^$1=//p" .env 2>/dev/null | tail -n 1; }
address=${2:-$(value EMBQ_BROKER_BIND)}
: "${address:?give the address of this machine that the new one reaches as well: sh deploy/add-machine.sh $name 10.0.0.5}"
if [ "$address" != "$(value EMBQ_BROKER_BIND)" ]; then
  rest=$(grep -v '^EMBQ_BROKER_BIND=' .env 2>/dev/null || true)
  printf '%s\n' ${rest:+"$rest"} "EMBQ_BROKER_BIND=$address" > .env
  # The certificate gets the address, and the broker starts anew with it; services reconnect by themselves.
  $compose up -d broker >&2
fi
$compose run --rm users --user "worker-$name" >&2
port=$(value EMBQ_BROKER_TLS_PORT)
cat <<END
# on $name, in a checkout:
mkdir -p secrets && scp -r $(id -un)@$address:$PWD/secrets/worker-$name secrets/worker
cat >> .env <<EOF
COMPOSE_FILE=compose.worker.yml
EMBQ_BROKER_URL=rediss://worker-$name@$address:${port:-6380}
EMBQ_MACHINE=$name
EMBQ_UID=\$(id -u)
EMBQ_GID=\$(id -g)
EOF
docker compose run --rm worker worker --check
docker compose up -d
END
