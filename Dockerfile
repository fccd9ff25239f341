# The packages of the GPU lock, and the compilers for kernels that are built at run time. The code is not in the image: mount a checkout.
#   docker build -t mrl . && apptainer build mrl.sif docker-daemon://mrl:latest      (docs/tutorials/slurm.md#containers)
# The same image with NVIDIA's Apex, which is optional (docs/adr/0017-apex-is-optional.md):
#   docker build -t mrl --target with-apex .
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS locked
RUN apt-get update && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv g++ git iproute2 procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mrl
COPY requirements/uv.txt requirements-gpu.txt scripts/install_lock.sh ./
RUN python3.12 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r uv.txt \
    && /opt/uv/bin/uv venv --python 3.12 /opt/venv \
    && ./install_lock.sh /opt/uv/bin/uv /opt/venv/bin/python requirements-gpu.txt --no-cache
# Engines compile kernels with the CUDA toolkit of the image.
ENV PATH=/opt/venv/bin:$PATH CUDA_HOME=/usr/local/cuda

FROM locked AS with-apex
ARG APEX_TAG=25.09
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0;12.0"
RUN git clone --depth 1 --branch "$APEX_TAG" https://github.com/NVIDIA/apex /opt/apex \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 /opt/uv/bin/uv pip install --no-cache --python /opt/venv/bin/python \
        --no-deps --no-build-isolation /opt/apex \
    && rm -r /opt/apex

FROM locked
