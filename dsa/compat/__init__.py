"""Functions with the names and signatures of other libraries, implemented with the ops of dsa, for engines that call
those libraries."""
