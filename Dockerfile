# The packages of the GPU lock, and the compilers for kernels that are built at run time. The code is not in the image: mount a checkout.
#   docker build -t mrl . && apptainer build mrl.sif docker-daemon://mrl:latest      (docs/tutorials/slurm.md#containers)
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv g++ git iproute2 procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mrl
COPY requirements/uv.txt requirements-gpu.txt ./
RUN python3.12 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r uv.txt \
    && /opt/uv/bin/uv venv --python 3.12 /opt/venv \
    && /opt/uv/bin/uv pip install --no-cache --compile-bytecode --python /opt/venv/bin/python --no-deps --require-hashes \
        --build-constraints requirements-gpu.txt -r requirements-gpu.txt
ENV PATH=/opt/venv/bin:$PATH
