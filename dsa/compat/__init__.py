"""Other libraries' names and signatures over the ops of dsa, for engines that call those by name."""
