"""Commands for who works on this repository; none of them is part of the package."""
