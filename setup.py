"""Metadata of the package mrl, and the version ranges of its dependencies.

`make lock` resolves these ranges and writes two locks: `requirements.txt` for machines without a GPU, and
`requirements-gpu.txt` for clusters. A test fails if a version in a lock is outside its range.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DEPENDENCIES = [
    # Models. Packages of the extra `train` need exact versions of torch and transformers.
    "torch>=2.14,<2.15",
    "megatron-core>=0.19.2,<0.20",
    "transformers>=5.19,<6",
    "tokenizers>=0.23",
    "safetensors>=0.8",
    "huggingface-hub>=1.30,<2",  # fetches models and data that are named by their ids
    # The controller.
    "hydra-core>=1.3.8,<1.4",
    "omegaconf>=2.3.1,<2.4",
    "pyyaml>=6",  # its errors have the line of a mistake in a config file
    "httpx>=0.28,<1",
    "aiohttp>=3.14,<4",  # handles the thousands of concurrent requests that agents make
    "orjson>=3.13,<4",
    "xxhash>=4",  # checksums
    "zstandard>=0.25",  # compresses the differences of weights that are sent to engines
    # Files of a run.
    "msgspec>=0.21",  # encodes the samples in the rollout log
    "filelock>=4",  # lets only one process use a run directory
    "fsspec>=2026.2",  # copies checkpoints to storage of any kind
    "psutil>=7",  # Megatron-Core imports it without declaring it
    # Data.
    "numpy>=2.3,<2.4",  # sglang with CUDA kernels needs mistral-common, which excludes 2.4
    "pyarrow>=26",
    "datasets>=5.2",  # reads folders that its save_to_disk wrote
    "jinja2>=3.1",  # defines the errors of chat templates
    "pillow>=13",  # decodes images
    # Rewards and evaluation.
    "math-verify[antlr4_9_3]>=0.9",  # the extra selects the version of antlr4 that hydra-core needs
    "pebble>=5.2",  # pools of processes whose tasks have deadlines
    "tenacity>=9.2",  # retries with limits
    "scipy>=1.18",  # confidence intervals
    # Display of metrics.
    "matplotlib>=3.11,<4",
    "rich>=15",
]

EXTRAS = {
    # Runs need these packages. `mrl plan`, `mrl convert`, `mrl config` and `mrl data` do not.
    "train": [
        "sglang>=0.5.23,<0.6",
        "ray[default]>=2.60,<3",
        "wandb>=0.31,<1",
    ],
    "gpu": [
        "transformer-engine[pytorch]>=2.20,<3",
        # compiles kernels of engines; torch pins the version of cuda-toolkit, and the compiler must fit torch's CUDA headers
        "cuda-toolkit[cccl,crt,nvcc,nvvm]",
    ],
    "optuna": ["optuna>=5,<6"],  # needed by hydra/sweeper=optuna
    # tracking.backends=[tensorboard,mlflow] and `mrl wandb-report` need these packages.
    "trackers": ["tensorboard>=2.20,<3", "mlflow-skinny>=3.10,<4", "wandb-workspaces>=0.4.10,<1"],
    "dev": [
        "cosmic-ray>=8.7",  # makes small changes of the code, which unit tests must notice
        "import-linter>=2.5",
        "linkchecker>=10.6",
        "mkdocs-material>=9.8,<10",
        "mkdocstrings[python]>=1.0.8",
        "packaging>=26",
        "pre-commit>=4",
        "pyrefly>=1.4,<2",
        "hypothesis>=6.140",
        "pytest>=9,<10",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8",
        "ruff>=0.15",
    ],
}

INSTALLED_FILES = ["conf", "slurm", "requirements.txt", "requirements-gpu.txt"]
"""Folders and files of the root that commands read at run time. See mrl/core/code_locations.py."""


class BuildWithInstalledFiles(build_py):
    """Build step that copies INSTALLED_FILES into the package mrl. An editable install reads them at the root of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in INSTALLED_FILES:
            source, target = Path(__file__).parent / name, Path(self.build_lib, "mrl", name)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                self.copy_file(str(source), str(target))


setup(
    name="mrl",
    version="0.1.0",
    description="Reinforcement learning of language models with Megatron-Core, SGLang and Ray",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="reinforcement-learning rlhf grpo ppo llm megatron sglang ray",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.12,<3.13",
    # With {"": "."}, an editable install is one line in a .pth file. Python then prefers our package `models` to a folder
    # `models/` in the working directory. `include` keeps tests and outputs out of a wheel.
    package_dir={"": "."},
    packages=find_packages(".", include=["mrl*", "parallel*", "models*"]),
    cmdclass={"build_py": BuildWithInstalledFiles},
    package_data={package: ["py.typed"] for package in ("mrl", "models", "parallel")}
    | {"mrl.tracking.report": ["*.html", "*.css", "*.js"]},
    install_requires=DEPENDENCIES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["mrl = mrl.cli:main"],
        "sglang.srt.platforms": ["mrl_cpu = mrl.rollout.cpu.sglang_platform:activate"],
    },
)
