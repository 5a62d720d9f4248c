"""Builds the site. Processes that gather import this file anew, so it imports nothing before it must.

python -m lessons.site FOLDER [NAME ...]    all pages, or those whose names begin so
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from lessons.site.build import build
    from lessons.site.pages import pages

    folder, *names = sys.argv[1:]
    build(Path(folder), [page for page in pages() if page.address.startswith(tuple(names or [""]))])
