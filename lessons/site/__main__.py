"""Builds the site; see `build`. Processes that gather import this file anew, so it imports nothing before it must."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from lessons.site.build import build

    build(Path(sys.argv[1]), sys.argv[2:])
