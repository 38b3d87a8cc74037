"""Parts of the show prefer-and-distil, each with a function `show(record)`."""
