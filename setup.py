"""All metadata of the package. The settings of the tools are in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent

DEMO = ["rich>=13", "scikit-learn>=1.3"]
MIGRATE = ["libcst>=1.5"]
PLOTS = ["matplotlib>=3.8", "rich>=13"]
TEST = [
    "build>=1.2",
    "expecttest>=0.2",  # torch's own database of operations, which tests read, imports it
    "hypothesis>=6.100",
    "matplotlib>=3.8",
    "mypy>=1.15",
    "numpy>=1.26",
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
    "selenium>=4.20",
]


class SourceDistribution(sdist):
    """The archive has the tests and benchmarks too, which are in no package."""

    def make_distribution(self) -> None:
        """Add to the list, which setuptools has made by now, what it does not find by itself."""
        self.filelist.extend(["CHANGELOG.md", "pyproject.toml"])
        for folder in ("tests", "tests/apex_scripts", "benchmarks"):
            for path in sorted((ROOT / folder).iterdir()):
                if path.suffix in (".py", ".md", ".png", ".json"):
                    self.filelist.append(str(path.relative_to(ROOT)))
        self.filelist.sort()
        self.filelist.remove_duplicates()
        super().make_distribution()


setup(
    name="amp_patch",
    version=runpy.run_path(str(ROOT / "amp_patch" / "version.py"))["__version__"],
    description="Mixed precision training in one line and one block, by patching PyTorch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the amp_patch authors",
    license_expression="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords=[
        "amp",
        "apex",
        "bfloat16",
        "deep learning",
        "float16",
        "loss scaling",
        "mixed precision",
        "pytorch",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["amp_patch", "amp_patch.*"]),
    package_data={"amp_patch": ["py.typed"]},
    # No upper bound: a cap cannot be lifted on a release that is out, and makes pip fall back to
    # an older one in silence. The classifiers say which versions are meant.
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "wrapt>=2.2"],
    extras_require={
        "demo": DEMO,
        "migrate": MIGRATE,
        "plots": PLOTS,
        "test": sorted(TEST + DEMO + MIGRATE),
    },
    cmdclass={"sdist": SourceDistribution},
    zip_safe=False,
)
