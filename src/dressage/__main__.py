from dressage.cli import main

main()
