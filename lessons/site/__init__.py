"""The course as a folder of pages that are read without an installation; explorers, players and cards work in them."""
