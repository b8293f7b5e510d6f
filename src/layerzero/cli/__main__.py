from layerzero.cli import main

main()
