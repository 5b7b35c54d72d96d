"""A package, so that pytest ends the browser and the servers that its files share with the last of them."""
