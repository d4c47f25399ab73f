# The images of the stack, by role: `producer` (enqueue, status and the rest too), `writer`, `worker` (index and serve too).
# What pip fetches stands in layers before the sources, so that a change of the sources builds in seconds. Any builder will
# do, BuildKit or the one before it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="embq" \
      org.opencontainers.image.description="Queue-fed embedding of images and texts on whatever GPUs you have" \
      org.opencontainers.image.licenses="Apache-2.0"
# Home is in /tmp, which is memory in the stack: whoever the container runs as may write there, and nothing stays.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1 \
    HOME=/tmp HF_HOME=/models XDG_CACHE_HOME=/models/cache
RUN groupadd --gid 1000 embq && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp embq \
 && mkdir -m 1777 /data /models /out /state
# From this version on, pip takes hashes from a file of constraints, for what packages ask for too.
RUN echo "pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13" | pip install --require-hashes --requirement /dev/stdin
WORKDIR /src

FROM base AS wheel
COPY deploy/hashes.txt deploy/
RUN pip install --require-hashes --constraint deploy/hashes.txt hatchling
COPY . ./
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS native
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++ libjpeg62-turbo-dev && rm -rf /var/lib/apt/lists/*
COPY deploy/hashes.txt deploy/
RUN pip install --require-hashes --constraint deploy/hashes.txt cmake ninja scikit-build-core
COPY native ./native
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./native

FROM base AS producer-packages
COPY pyproject.toml ./
COPY deploy/hashes.txt deploy/requirements.py deploy/trim.py deploy/
RUN python deploy/requirements.py broker gcs http s3 > requirements.txt \
 && pip install --require-hashes --constraint deploy/hashes.txt --requirement requirements.txt \
 && python deploy/trim.py

FROM producer-packages AS producer
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
WORKDIR /
USER embq
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 CMD ["embq", "health"]
ENTRYPOINT ["embq"]
CMD ["producer"]

FROM producer-packages AS writer-packages
RUN python deploy/requirements.py writer > requirements.txt \
 && pip install --require-hashes --constraint deploy/hashes.txt --requirement requirements.txt \
 && python deploy/trim.py

FROM writer-packages AS writer
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
WORKDIR /
USER embq
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 CMD ["embq", "health"]
ENTRYPOINT ["embq"]
CMD ["writer"]

FROM base AS worker-packages
# By itself, and named here: gigabytes that stay as they are when any other version changes. An index of builds, such as
# https://download.pytorch.org/whl/cpu, may have these two alone; what they ask for comes from the usual one, too.
ARG TORCH=2.15.0
ARG TORCHVISION=0.29.2
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX" --no-deps} "torch==$TORCH" "torchvision==$TORCHVISION" \
 && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$TORCH" "torchvision==$TORCHVISION"
COPY pyproject.toml ./
COPY deploy/hashes.txt deploy/requirements.py deploy/
# faiss for the CPU or for the GPU: index or index-gpu; further extras of embq: int8.
ARG FAISS=index
ARG EXTRAS=""
# Of torch and its libraries the versions above stay, whatever hashes.txt has of them.
RUN python deploy/requirements.py broker gcs http minilm s3 serve worker writer "$FAISS" ${EXTRAS} > requirements.txt \
 && pip list --format=freeze | grep -Eio '^(torch|torchvision|[a-z-]*triton[a-z-]*|nvidia-[^=]*|cuda-[^=]*)==' | sed 's/^/^/' > built \
 && grep -ivf built deploy/hashes.txt > hashes.txt \
 && pip install --require-hashes --constraint hashes.txt --requirement requirements.txt

FROM worker-packages AS worker
COPY --from=native /wheels /wheels
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
WORKDIR /
USER embq
# Models may have to come over the network first.
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=3 CMD ["embq", "health"]
ENTRYPOINT ["embq"]
CMD ["worker"]
