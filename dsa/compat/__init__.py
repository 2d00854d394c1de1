"""Other libraries' function names and signatures, implemented with the ops of dsa, for engines that call those
names."""
