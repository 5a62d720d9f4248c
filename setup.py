"""All of it stands in pyproject.toml, but for one thing that an editable installation needs."""

from setuptools import Distribution, setup


class WithData(Distribution):
    """Setuptools asks for `has_data`, which it never defines, and so leaves data files out."""

    has_data = Distribution.has_data_files


setup(distclass=WithData)
