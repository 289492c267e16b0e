# An image with this package, for `spmd launch --emit jobset --image ...` and any container.
#
#   docker build -t train .                                     # CPU
#   docker build -t train --build-arg GROUND=tpu .              # libtpu beside it
#   docker build -t train --build-arg GROUND=cuda .             # jax's CUDA packages beside it
#   docker build -t train --build-arg TORCH_INDEX=URL .         # torch from that package index, as the one of CPU builds
#
# A program of your own: FROM train, COPY train.py requirements.txt ./ and RUN pip install -r requirements.txt
FROM python:3.12-slim

ARG GROUND=cpu
ARG TORCH_INDEX=

# git: for --code git+URL@REF.
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt ./
# torch first and alone: it decides the build (cpu or cuda) from the index at hand, and the rest then resolves around it.
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY benchmarks ./benchmarks
COPY mesh ./mesh
COPY spmd ./spmd
RUN if [ "$GROUND" = cpu ]; then extras=hf; else extras="hf,$GROUND"; fi \
    && pip install --no-cache-dir --constraint constraints.txt ".[$extras]"

WORKDIR /app
CMD ["spmd", "doctor"]
