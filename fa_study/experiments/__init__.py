"""The measurements behind the figures: one function per figure, arguments in, tidy DataFrame out."""
