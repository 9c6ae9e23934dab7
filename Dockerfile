# DeToNATION in a container: CUDA by default, the CPU alone by a build argument.
#
#   docker build -t detonation .
#   mkdir -p runs  # by yourself: docker would make it as root
#   docker run --rm --gpus all --network host --ipc host --user "$(id -u)" -e HOME=/tmp \
#       -v "$PWD/runs:/work/runs" detonation train quick-lm
#
#   docker build -t detonation:cpu --build-arg BASE=python:3.12-slim-bookworm --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# --network host: the ranks of other machines must reach the ports of these. --ipc host: the memory that ranks share.
ARG BASE=pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY src src
RUN pip install --no-cache-dir "hatchling>=1.26" \
    && python -c "import hatchling.build; hatchling.build.build_wheel('/dist')"

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
# g++ compiles the kernels of the CPU on their first use; iproute2 shows interfaces and makes namespaces.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ iproute2 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /dist/*.whl /tmp/
# A torch that the base has is kept. Some bases mark their Python as managed by the system; here it is ours.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "$(ls /tmp/*.whl)[train]" && rm /tmp/*.whl
RUN useradd --create-home detonation && mkdir /work && chown detonation /work
USER detonation
WORKDIR /work
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["detonation"]
CMD ["--version"]
